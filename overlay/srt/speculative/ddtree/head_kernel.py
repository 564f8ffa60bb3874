# SPDX-License-Identifier: Apache-2.0
"""The drafter's best tokens of every row of logits in two passes over them, whatever the vocabulary.

The first pass reads every logit once. Of each group of neighbouring columns it keeps the largest, and of each tile what
the partition sum needs. The k best tokens lie in the k groups with the largest maxima: of a token elsewhere, each of
those groups holds a better one. So the second pass, one program a row, picks k groups, reads these again and picks k
tokens. Both pick by bisection of the value that k reach, ties by the lower index; only the k that are left are sorted.

Logits are compared as they come from the matrix product, as integers of the same order. Columns that are no tokens are
below -inf.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from sglang.srt.speculative.ddtree.draft_head import Choices, Columns
from sglang.srt.speculative.ddtree.tree_kernel import ordered_key, value_of_key


#: Columns that a program of the first pass reads.
TILE = 4096

#: Sums of a tile: the largest finished logit m, the sum of e = exp(exponent * (z - m)); with exponents also those of
#: (z - m) * e, of (z - m)**2 * e, and of exp(z - m).
_PLAIN_SUMS, _ALL_SUMS = 2, 5

#: Low bits of an ordered key that say nothing, by the type that the logits had.
_SPARE_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


@triton.jit
def _finish(value, scale, cap, SCALED: tl.constexpr, CAPPED: tl.constexpr):
    if SCALED:
        value = value * scale
    if CAPPED:
        value = cap * (1.0 - 2.0 / (tl.exp(2.0 * value / cap) + 1.0))  # tanh
    return value


@triton.jit
def _load_keys(logits, columns, org, added_start, added, mask, SPARE: tl.constexpr):
    """Keys of some columns of a row; -inf for NaN, and less for what is no token."""
    token = mask & ((columns < org) | ((columns >= added_start) & (columns < added_start + added)))
    value = tl.load(logits + columns, mask=token, other=0.0).to(tl.float32)
    key = ordered_key(tl.where(value == value, value, float("-inf"))) >> SPARE
    return value, tl.where(token, key, -(1 << 31 - SPARE)), token


@triton.jit
def _key_value(key, SPARE: tl.constexpr):
    """The logit of a key, -inf for what is no token."""
    whole = (key << SPARE) | tl.where(key < 0, (1 << SPARE) - 1, 0)
    return tl.where(key == -(1 << 31 - SPARE), float("-inf"), value_of_key(whole))


@triton.jit
def _pick(keys, k, SPARE: tl.constexpr):
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


@triton.jit
def _read_kernel(
    logits,  # [rows, columns], stride `stride`
    exponents,  # float32 [positions], or None
    group_keys,  # int32 [rows, groups] out
    sums,  # float32 [rows, tiles, SUMS] out
    stride,
    positions,
    groups,
    org,
    added_start,
    added,
    scale,
    cap,
    SCALED: tl.constexpr,
    CAPPED: tl.constexpr,
    SPARE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,  # of a tile
    SUMS: tl.constexpr,
):
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group = tile * GROUPS + tl.arange(0, GROUPS)
    columns = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    value, key, token = _load_keys(logits + row * stride, columns, org, added_start, added, columns >= 0, SPARE)
    tl.store(group_keys + row * groups + group, tl.max(key, axis=1), mask=group < groups)

    z = _finish(value, scale, cap, SCALED, CAPPED)
    top = tl.max(tl.where(token & (value == value), z, float("-inf")))
    away = z - tl.where(top == float("-inf"), 0.0, top)
    out = sums + (row * tl.num_programs(1) + tile) * SUMS
    tl.store(out, top)
    if exponents is None:
        weight = tl.where(token, tl.exp(away), 0.0)
        tl.store(out + 1, tl.sum(weight))
    else:
        exponent = tl.load(exponents + row % positions)
        weight = tl.where(token, tl.exp(exponent * away), 0.0)
        moment = tl.where(weight == 0.0, 0.0, weight * away)
        spread = tl.where(weight == 0.0, 0.0, moment * away)
        plain = tl.where(token, tl.exp(away), 0.0)
        tl.store(out + 1, tl.sum(weight))
        tl.store(out + 2, tl.sum(moment))
        tl.store(out + 3, tl.sum(spread))
        tl.store(out + 4, tl.sum(plain))


@triton.jit
def _row_sums(sums, row, tiles, exponent, TILES: tl.constexpr, SUMS: tl.constexpr):
    """Of a whole row: log of the partition sum, mean, variance, log of the partition sum at exponent 1."""
    tile = tl.arange(0, TILES)
    at = sums + (row * tiles + tile) * SUMS
    here = tile < tiles
    tops = tl.load(at, mask=here, other=float("-inf"))
    top = tl.max(tops, axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)
    away = tops - top
    share = tl.where(away == float("-inf"), 0.0, tl.exp(exponent * away))
    away = tl.where(away == float("-inf"), 0.0, away)
    first = tl.load(at + 1, mask=here, other=0.0)
    total = tl.sum(share * first, axis=0)
    log_z = exponent * top + tl.log(total)
    mean, variance, plain_log_z = log_z, log_z, log_z
    if SUMS > 2:
        second = tl.load(at + 2, mask=here, other=0.0)
        third = tl.load(at + 3, mask=here, other=0.0)
        shift = tl.sum(share * (second + away * first), axis=0) / total
        square = tl.sum(share * (third + 2.0 * away * second + away * away * first), axis=0) / total
        mean = top + shift
        variance = tl.maximum(square - shift * shift, 0.0)
        plain_share = tl.where(tops == float("-inf"), 0.0, tl.exp(away))
        plain_log_z = top + tl.log(tl.sum(plain_share * tl.load(at + 4, mask=here, other=0.0), axis=0))
    return log_z, mean, variance, plain_log_z


@triton.jit
def _store_choices(
    row, place, k, key, ids, z, log_z, mean, variance, plain_log_z, exponent, log_probs, token_ids, finished, moments,
    INVALID: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Write a row of `Choices`; `moments` is [3, rows]."""
    kept, out = place < k, row * k + place
    score = exponent * z - log_z
    score = tl.where(score > 0.0, 0.0, score)  # NaN stays NaN
    tl.store(log_probs + out, tl.where(key == INVALID, float("-inf"), score), mask=kept)
    tl.store(token_ids + out, tl.where(key == INVALID, 0, ids).to(tl.int64), mask=kept)
    if SUMS > 2:
        tl.store(finished + out, z, mask=kept)
        rows = tl.num_programs(0)
        tl.store(moments + row, mean)
        tl.store(moments + rows + row, variance)
        tl.store(moments + 2 * rows + row, plain_log_z)


@triton.jit
def _choose_kernel(
    logits,
    exponents,
    group_keys,
    sums,
    scratch,  # int32 [rows, 2 * KEPT]
    log_probs,  # float32 [rows, k] out; or int32 [rows, 2 * k + 4] for the other ranks
    token_ids,  # int64 [rows, k] out, or None
    finished,  # float32 [rows, k] out, or None
    moments,  # float32 [3, rows] out, or None
    stride,
    positions,
    groups,
    tiles,
    k,
    org,
    first_org_id,
    added_start,
    added,
    first_added_id,
    scale,
    cap,
    SCALED: tl.constexpr,
    CAPPED: tl.constexpr,
    SPARE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,  # a power of two, at least the groups of a row
    KEPT: tl.constexpr,  # a power of two, at least k
    TILES: tl.constexpr,
    SUMS: tl.constexpr,
    PACKED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    mine = scratch + row * 2 * KEPT
    invalid: tl.constexpr = -(1 << 31 - SPARE)

    group = tl.arange(0, GROUPS)
    keys = tl.load(group_keys + row * groups + group, mask=group < groups, other=invalid)
    wanted = tl.minimum(k, groups)
    taken, place = _pick(keys, wanted, SPARE)
    tl.store(mine + place, group, mask=taken & (group < groups))
    tl.debug_barrier()

    cell = tl.arange(0, KEPT * GROUP)
    picked = cell // GROUP < wanted
    columns = tl.load(mine + cell // GROUP, mask=picked, other=0) * GROUP + cell % GROUP
    _, keys, _ = _load_keys(logits + row * stride, columns, org, added_start, added, picked, SPARE)
    taken, place = _pick(keys, k, SPARE)
    tl.debug_barrier()
    tl.store(mine + place, keys, mask=taken & (place < KEPT))
    tl.store(mine + KEPT + place, columns, mask=taken & (place < KEPT))
    tl.debug_barrier()

    place = tl.arange(0, KEPT)
    key = tl.load(mine + place, mask=place < k, other=invalid).to(tl.int64)
    column = tl.load(mine + KEPT + place, mask=place < k, other=0).to(tl.int64)
    packed = tl.sort((key << 32) | (0x7FFFFFFF - column), descending=True)
    key = (packed >> 32).to(tl.int32)
    column = (0x7FFFFFFF - (packed & 0xFFFFFFFF)).to(tl.int32)
    ids = tl.where(column < org, first_org_id + column, first_added_id + column - added_start)

    exponent = 1.0
    if exponents is not None:
        exponent = tl.load(exponents + row % positions)
    log_z, mean, variance, plain_log_z = _row_sums(sums, row, tiles, exponent, TILES, SUMS)
    raw = _key_value(key, SPARE)
    if PACKED:
        out = log_probs + row * (2 * k + 4)
        tl.store(out + place, raw.to(tl.int32, bitcast=True), mask=place < k)
        tl.store(out + k + place, tl.where(key == invalid, -1, ids), mask=place < k)
        tl.store(out + 2 * k, log_z.to(tl.int32, bitcast=True))
        tl.store(out + 2 * k + 1, mean.to(tl.int32, bitcast=True))
        tl.store(out + 2 * k + 2, variance.to(tl.int32, bitcast=True))
        tl.store(out + 2 * k + 3, plain_log_z.to(tl.int32, bitcast=True))
    else:
        z = _finish(raw, scale, cap, SCALED, CAPPED)
        _store_choices(
            row, place, k, key, ids, z, log_z, mean, variance, plain_log_z, exponent,
            log_probs, token_ids, finished, moments, invalid, SUMS,
        )  # fmt: skip


@triton.jit
def _merge_kernel(
    packed,  # int32 [rows, ranks * (2 * k + 4)]
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
    row = tl.program_id(0).to(tl.int64)
    invalid: tl.constexpr = -(1 << 31)
    size = 2 * k + 4
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
    mean, variance, plain_log_z = log_z, log_z, log_z
    if SUMS > 2:
        means = tl.load(of_rank + 1, mask=rank < ranks, other=0).to(tl.float32, bitcast=True)
        spreads = tl.load(of_rank + 2, mask=rank < ranks, other=0).to(tl.float32, bitcast=True)
        plain = tl.load(of_rank + 3, mask=rank < ranks, other=-8388608).to(tl.float32, bitcast=True)
        mean = tl.sum(tl.where(shares == 0.0, 0.0, shares * means), axis=0)
        away = means - mean
        variance = tl.sum(tl.where(shares == 0.0, 0.0, shares * (spreads + away * away)), axis=0)
        plain_log_z, _ = _log_sum(plain)
    exponent = 1.0
    if exponents is not None:
        exponent = tl.load(exponents + row % positions)
    z = _finish(_key_value(key, 0), scale, cap, SCALED, CAPPED)
    _store_choices(
        row, place, k, key, ids, z, log_z, mean, variance, plain_log_z, exponent,
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


def choose(
    logits: torch.Tensor,
    k: int,
    columns: Columns,
    *,
    scale: float | None,
    cap: float | None,
    exponents: torch.Tensor | None,
    group: Any,
) -> Choices:
    """The k best tokens of each row; arguments and result as in `head_reference.choose`."""
    rows, size = logits.shape
    alone = group.world_size == 1
    device = logits.device
    best = _Outputs(rows, k, exponents is not None, device) if alone else None
    sums = _PLAIN_SUMS if exponents is None else _ALL_SUMS
    group_size = 64 if k <= 64 else 32
    groups, tiles = triton.cdiv(size, group_size), triton.cdiv(size, TILE)
    spare = _SPARE_BITS[logits.dtype]
    kept = max(2, triton.next_power_of_2(k))
    group_keys = torch.empty((rows, groups), dtype=torch.int32, device=device)
    tile_sums = torch.empty((rows, tiles, sums), dtype=torch.float32, device=device)
    scratch = torch.empty((rows, 2 * kept), dtype=torch.int32, device=device)
    packed = None if alone else torch.empty((rows, 2 * k + 4), dtype=torch.int32, device=device)
    positions = 1 if exponents is None else len(exponents)
    finishing = {"SCALED": scale is not None, "CAPPED": bool(cap), "SUMS": sums}
    scale, cap = 1.0 if scale is None else float(scale), float(cap or 1.0)
    _read_kernel[(rows, tiles)](
        logits,
        exponents,
        group_keys,
        tile_sums,
        logits.stride(0),
        positions,
        groups,
        columns.org,
        columns.added_start,
        columns.added,
        scale,
        cap,
        SPARE=spare,
        GROUP=group_size,
        GROUPS=TILE // group_size,
        num_warps=4,
        **finishing,
    )
    _choose_kernel[(rows,)](
        logits,
        exponents,
        group_keys,
        tile_sums,
        scratch,
        best.log_probs if alone else packed,
        best.token_ids if alone else None,
        best.finished if alone else None,
        best.moments if alone else None,
        logits.stride(0),
        positions,
        groups,
        tiles,
        k,
        columns.org,
        columns.first_org_id,
        columns.added_start,
        columns.added,
        columns.first_added_id,
        scale,
        cap,
        SPARE=spare,
        GROUP=group_size,
        GROUPS=triton.next_power_of_2(groups),
        KEPT=kept,
        TILES=triton.next_power_of_2(tiles),
        PACKED=not alone,
        num_warps=8,
        **finishing,
    )
    if alone:
        return best.choices()
    packed = group.all_gather(packed, dim=-1)
    best = _Outputs(rows, k, exponents is not None, device)
    _merge_kernel[(rows,)](
        packed,
        exponents,
        best.log_probs,
        best.token_ids,
        best.finished,
        best.moments,
        positions,
        group.world_size,
        k,
        scale,
        cap,
        CANDIDATES=max(2, triton.next_power_of_2(group.world_size * k)),
        RANKS=triton.next_power_of_2(group.world_size),
        num_warps=4,
        **finishing,
    )
    return best.choices()


class _Outputs:
    """What a kernel fills for a `Choices`."""

    def __init__(self, rows: int, k: int, with_moments: bool, device: torch.device) -> None:
        self.log_probs = torch.empty((rows, k), dtype=torch.float32, device=device)
        self.token_ids = torch.empty((rows, k), dtype=torch.int64, device=device)
        self.finished = torch.empty_like(self.log_probs) if with_moments else None
        self.moments = torch.empty((3, rows), dtype=torch.float32, device=device) if with_moments else None

    def choices(self) -> Choices:
        """The tensors by their names."""
        if self.moments is None:
            return Choices(self.log_probs, self.token_ids)
        return Choices(self.log_probs, self.token_ids, self.finished, *self.moments.unbind(0))
