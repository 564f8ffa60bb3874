# SPDX-License-Identifier: Apache-2.0
"""The last part of a head's pass: a row of `Choices` out of its k best tokens and sums, of one rank or of all."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from sglang.srt.speculative.ddtree.draft_head import Choices
from sglang.srt.speculative.ddtree.keys_kernel import ordered_key, value_of_short_key


@triton.jit
def finish(value, scale, cap, SCALED: tl.constexpr, CAPPED: tl.constexpr):
    """What the target does to its logits."""
    if SCALED:
        value = value * scale
    if CAPPED:
        value = cap * (1.0 - 2.0 / (tl.exp(2.0 * value / cap) + 1.0))  # tanh
    return value


@triton.jit
def store_choices(
    row, place, k, key, ids, z, log_z, mean, plain_log_z, exponent, log_probs, token_ids, finished, moments,
    INVALID: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Write a row of `Choices`; `moments` is [2, rows]."""
    kept, out = place < k, row * k + place
    score = exponent * z - log_z
    score = tl.where(score > 0.0, 0.0, score)  # NaN stays NaN
    tl.store(log_probs + out, tl.where(key == INVALID, float("-inf"), score), mask=kept)
    tl.store(token_ids + out, tl.where(key == INVALID, 0, ids).to(tl.int64), mask=kept)
    if SUMS > 2:
        tl.store(finished + out, z, mask=kept)
        rows = tl.num_programs(0)
        tl.store(moments + row, mean)
        tl.store(moments + rows + row, plain_log_z)


@triton.jit
def merge_kernel(
    packed,  # int32 [rows, ranks * (2 * k + SUMS - 1)]
    exponents,
    log_probs,
    token_ids,
    finished,
    moments,
    positions,
    ranks,
    k,
    scale,
    cap,
    SCALED: tl.constexpr,
    CAPPED: tl.constexpr,
    CANDIDATES: tl.constexpr,  # a power of two, at least ranks * k
    RANKS: tl.constexpr,  # a power of two, at least the ranks
    SUMS: tl.constexpr,
):
    """One program merges the candidates and sums of all ranks for one row."""
    row = tl.program_id(0).to(tl.int64)
    invalid: tl.constexpr = -(1 << 31)
    size = 2 * k + SUMS - 1
    mine = packed + row * ranks * size
    place = tl.arange(0, CANDIDATES)
    at = mine + place // k * size + place % k
    here = place < ranks * k
    raw = tl.load(at, mask=here, other=0).to(tl.float32, bitcast=True)
    ids = tl.load(at + k, mask=here, other=-1)
    key = tl.where(ids >= 0, ordered_key(raw), invalid).to(tl.int64)
    ordered = tl.sort((key << 32) | (0x7FFFFFFF - tl.maximum(ids, 0).to(tl.int64)), descending=True)
    key = (ordered >> 32).to(tl.int32)
    ids = (0x7FFFFFFF - (ordered & 0xFFFFFFFF)).to(tl.int32)

    rank = tl.arange(0, RANKS)
    of_rank = mine + rank * size + 2 * k
    log_zs = tl.load(of_rank, mask=rank < ranks, other=-8388608).to(tl.float32, bitcast=True)  # -inf
    log_z, shares = _log_sum(log_zs)
    mean, plain_log_z = log_z, log_z
    if SUMS > 2:
        means = tl.load(of_rank + 1, mask=rank < ranks, other=0).to(tl.float32, bitcast=True)
        plain = tl.load(of_rank + 2, mask=rank < ranks, other=-8388608).to(tl.float32, bitcast=True)
        mean = tl.sum(tl.where(shares == 0.0, 0.0, shares * means), axis=0)
        plain_log_z, _ = _log_sum(plain)
    exponent = 1.0
    if exponents is not None:
        exponent = tl.load(exponents + row % positions)
    z = finish(value_of_short_key(key, 0), scale, cap, SCALED, CAPPED)
    store_choices(
        row, place, k, key, ids, z, log_z, mean, plain_log_z, exponent,
        log_probs, token_ids, finished, moments, invalid, SUMS,
    )  # fmt: skip


@triton.jit
def _log_sum(logs):
    """Logarithm of a sum of which the logarithms of the parts are given, and each part's share."""
    top = tl.max(logs, axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)
    parts = tl.exp(logs - top)
    total = tl.sum(parts, axis=0)
    return top + tl.log(total), parts / total


class Outputs:
    """What a kernel fills for a `Choices`."""

    def __init__(self, rows: int, k: int, with_moments: bool, device: torch.device) -> None:
        self.log_probs = torch.empty((rows, k), dtype=torch.float32, device=device)
        self.token_ids = torch.empty((rows, k), dtype=torch.int64, device=device)
        self.finished = torch.empty_like(self.log_probs) if with_moments else None
        self.moments = torch.empty((2, rows), dtype=torch.float32, device=device) if with_moments else None

    def choices(self) -> Choices:
        """The tensors by their names."""
        if self.moments is None:
            return Choices(self.log_probs, self.token_ids)
        return Choices(self.log_probs, self.token_ids, self.finished, *self.moments.unbind(0))
