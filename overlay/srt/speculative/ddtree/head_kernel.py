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
from sglang.srt.speculative.ddtree.head_merge_kernel import Outputs, finish, merge_kernel, store_choices
from sglang.srt.speculative.ddtree.keys_kernel import load_keys, pick, value_of_short_key
from sglang.srt.speculative.ddtree.launching import launch


#: Columns that a program of the first pass reads.
TILE = 4096

#: Sums of a tile: the largest finished logit m, the sum of e = exp(exponent * (z - m)); with moments also those of
#: (z - m) * e and of exp(z - m). A row has one less: the first two give one logarithm.
_PLAIN_SUMS, _ALL_SUMS = 2, 4

#: Low bits of an ordered key that say nothing, by the type that the logits had.
_SPARE_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


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
    value, key, token = load_keys(logits + row * stride, columns, org, added_start, added, columns >= 0, SPARE)
    tl.store(group_keys + row * groups + group, tl.max(key, axis=1), mask=group < groups)

    z = finish(value, scale, cap, SCALED, CAPPED)
    top = tl.max(tl.where(token & (value == value), z, float("-inf")))
    away = z - tl.where(top == float("-inf"), 0.0, top)
    out = sums + (row * tl.num_programs(1) + tile) * SUMS
    tl.store(out, top)
    scaled = away
    if exponents is not None:
        scaled = tl.load(exponents + row % positions) * away
    weight = tl.where(token, tl.exp(scaled), 0.0)
    tl.store(out + 1, tl.sum(weight))
    if SUMS > 2:
        moment = tl.where(weight == 0.0, 0.0, weight * away)
        plain = tl.where(token, tl.exp(away), 0.0)
        tl.store(out + 2, tl.sum(moment))
        tl.store(out + 3, tl.sum(plain))


@triton.jit
def _row_sums(sums, row, tiles, exponent, TILES: tl.constexpr, SUMS: tl.constexpr):
    """Of a whole row: log of the partition sum, mean, log of the partition sum at exponent 1."""
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
    mean, plain_log_z = log_z, log_z
    if SUMS > 2:
        second = tl.load(at + 2, mask=here, other=0.0)
        mean = top + tl.sum(share * (second + away * first), axis=0) / total
        plain_share = tl.where(tops == float("-inf"), 0.0, tl.exp(away))
        plain_log_z = top + tl.log(tl.sum(plain_share * tl.load(at + 3, mask=here, other=0.0), axis=0))
    return log_z, mean, plain_log_z


@triton.jit
def _choose_kernel(
    logits,
    exponents,
    group_keys,
    sums,
    scratch,  # int32 [rows, 2 * KEPT]
    log_probs,  # float32 [rows, k] out; or int32 [rows, 2 * k + SUMS - 1] for the other ranks
    token_ids,  # int64 [rows, k] out, or None
    finished,  # float32 [rows, k] out, or None
    moments,  # float32 [2, rows] out, or None
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
    taken, place = pick(keys, wanted, SPARE)
    tl.store(mine + place, group, mask=taken & (group < groups))
    tl.debug_barrier()

    cell = tl.arange(0, KEPT * GROUP)
    picked = cell // GROUP < wanted
    columns = tl.load(mine + cell // GROUP, mask=picked, other=0) * GROUP + cell % GROUP
    _, keys, _ = load_keys(logits + row * stride, columns, org, added_start, added, picked, SPARE)
    taken, place = pick(keys, k, SPARE)
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
    log_z, mean, plain_log_z = _row_sums(sums, row, tiles, exponent, TILES, SUMS)
    raw = value_of_short_key(key, SPARE)
    if PACKED:
        out = log_probs + row * (2 * k + SUMS - 1)
        tl.store(out + place, raw.to(tl.int32, bitcast=True), mask=place < k)
        tl.store(out + k + place, tl.where(key == invalid, -1, ids), mask=place < k)
        tl.store(out + 2 * k, log_z.to(tl.int32, bitcast=True))
        if SUMS > 2:
            tl.store(out + 2 * k + 1, mean.to(tl.int32, bitcast=True))
            tl.store(out + 2 * k + 2, plain_log_z.to(tl.int32, bitcast=True))
    else:
        z = finish(raw, scale, cap, SCALED, CAPPED)
        store_choices(
            row, place, k, key, ids, z, log_z, mean, plain_log_z, exponent,
            log_probs, token_ids, finished, moments, invalid, SUMS,
        )  # fmt: skip


def choose(
    logits: torch.Tensor,
    k: int,
    columns: Columns,
    *,
    scale: float | None,
    cap: float | None,
    exponents: torch.Tensor | None,
    moments: bool = True,
    group: Any,
) -> Choices:
    """The k best tokens of each row; arguments and result as in `head_reference.choose`."""
    rows, size = logits.shape
    alone, device, with_moments = group.world_size == 1, logits.device, moments and exponents is not None
    sums = _ALL_SUMS if with_moments else _PLAIN_SUMS
    group_size = 64 if k <= 64 else 32
    groups, tiles = triton.cdiv(size, group_size), triton.cdiv(size, TILE)
    kept = max(2, triton.next_power_of_2(k))
    group_keys = torch.empty((rows, groups), dtype=torch.int32, device=device)
    tile_sums = torch.empty((rows, tiles, sums), dtype=torch.float32, device=device)
    scratch = torch.empty((rows, 2 * kept), dtype=torch.int32, device=device)
    positions = 1 if exponents is None else len(exponents)
    finishing = (1.0 if scale is None else float(scale), float(cap or 1.0))
    steps = {"SCALED": scale is not None, "CAPPED": bool(cap)}
    layout = {**steps, "SPARE": _SPARE_BITS[logits.dtype], "GROUP": group_size}
    key = (logits.dtype, logits.stride(0), k, columns, exponents is None, alone)

    reading = (logits, exponents, group_keys, tile_sums, logits.stride(0), positions, groups)
    reading += (columns.org, columns.added_start, columns.added, *finishing)
    constants = {**layout, "GROUPS": TILE // group_size, "SUMS": sums}
    launch(_read_kernel, (rows, tiles, 1), reading, constants, num_warps=4, key=key)

    best = Outputs(rows, k, with_moments, device)
    packed = None if alone else torch.empty((rows, 2 * k + sums - 1), dtype=torch.int32, device=device)
    out = (best.log_probs, best.token_ids, best.finished, best.moments) if alone else (packed, None, None, None)
    choosing = (logits, exponents, group_keys, tile_sums, scratch, *out, logits.stride(0), positions, groups, tiles, k)
    choosing += (columns.org, columns.first_org_id, columns.added_start, columns.added, columns.first_added_id)
    constants = {
        **layout,
        "GROUPS": triton.next_power_of_2(groups),
        "KEPT": kept,
        "TILES": triton.next_power_of_2(tiles),
        "SUMS": sums,
        "PACKED": not alone,
    }
    launch(_choose_kernel, (rows, 1, 1), choosing + finishing, constants, num_warps=8, key=key)
    if alone:
        return best.choices()

    packed, ranks = group.all_gather(packed, dim=-1), group.world_size
    merging = (packed, exponents, best.log_probs, best.token_ids, best.finished, best.moments, positions, ranks, k)
    constants = {
        **steps,
        "CANDIDATES": max(2, triton.next_power_of_2(ranks * k)),
        "RANKS": triton.next_power_of_2(ranks),
        "SUMS": sums,
    }
    launch(merge_kernel, (rows, 1, 1), merging + finishing, constants, num_warps=4, key=(*key, ranks))
    return best.choices()
