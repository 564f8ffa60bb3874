# SPDX-License-Identifier: Apache-2.0
"""Logits as integers of the same order, which a warp compares and reduces faster, and how the k largest are picked.

A short key is a key without the low bits that its logits' type has not; what is no token is below -inf.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ordered_key(value):
    """float32 without NaN as an int32 of the same order; -0.0 and 0.0 are one value."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of_key(key):
    """The float32 that `ordered_key` was made of."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def load_keys(logits, columns, org, added_start, added, mask, SPARE: tl.constexpr):
    """Keys of some columns of a row; -inf for NaN, and less for what is no token."""
    token = mask & ((columns < org) | ((columns >= added_start) & (columns < added_start + added)))
    value = tl.load(logits + columns, mask=token, other=0.0).to(tl.float32)
    key = ordered_key(tl.where(value == value, value, float("-inf"))) >> SPARE
    return value, tl.where(token, key, -(1 << 31 - SPARE)), token


@triton.jit
def value_of_short_key(key, SPARE: tl.constexpr):
    """The logit of a key, -inf for what is no token."""
    whole = (key << SPARE) | tl.where(key < 0, (1 << SPARE) - 1, 0)
    return tl.where(key == -(1 << 31 - SPARE), float("-inf"), value_of_key(whole))


@triton.jit
def pick(keys, k, SPARE: tl.constexpr):
    """Which are the k largest, ties by the lower index, and the place of each among those, in order of index."""
    bar = tl.where(tl.sum((keys >= 0).to(tl.int32), axis=0) >= k, 0, -(1 << 31 - SPARE))
    for i in range(31 - SPARE):
        higher = bar + (1 << (30 - SPARE - i))
        bar = tl.where(tl.sum((keys >= higher).to(tl.int32), axis=0) >= k, higher, bar)
    above, at = keys > bar, keys == bar
    counts = tl.cumsum(above.to(tl.int32) + (at.to(tl.int32) << 16), axis=0)
    room = k - tl.sum(above.to(tl.int32), axis=0)
    above_before, at_before = counts & 0xFFFF, counts >> 16
    return above | (at & (at_before <= room)), above_before + tl.minimum(at_before, room) - 1
