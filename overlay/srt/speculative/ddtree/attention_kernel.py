# SPDX-License-Identifier: Apache-2.0
"""Attention of one tree a request to its committed tokens and its own nodes, in one launch or two.

A tree has few rows, and the heads of a group read the same keys. So the rows of a program are all nodes of a request
for all heads of one group, which read each key and value once; where requests are too few to fill the device, several
programs share the committed tokens of one, and a second launch merges what they found by its log-sum-exp (as
FlashDecoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html). How many share is no variant of the first
launch, and the second's few are loaded together: a batch of another size must not wait for the compiler.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton
import triton.language as tl


#: Rows of a program at most.
_BLOCK_M = 64
#: Programs that share the committed tokens of a request, at most; the device is to have about so many per processor.
#: That bounds what they keep for the second launch: 9 MB for 132 processors and heads of 128, reused by every layer.
_MOST_SPLITS, _PROGRAMS = 32, 2
#: Splits that a program of the second launch is compiled for; it merges as many rows as make `_MOST_SPLITS` parts.
_MERGED_SPLITS = (4, 8, 16, 32)
_LOG2E = 1.4426950408889634

#: Like what the second launch's variants are loaded for.
_loaded: set[tuple[Hashable, ...]] = set()


@triton.jit
def _attend(q, keys, values, visible, top, total, found, scale):
    """Take one block of keys and values in: softmax on the way, base 2."""
    scores = tl.dot(q, keys) * scale
    scores = tl.where(visible, scores, float("-inf"))
    next_top = tl.maximum(top, tl.max(scores, axis=1))
    # A row that has seen nothing yet must not become a number minus itself.
    base = tl.where(next_top == float("-inf"), 0.0, next_top)
    kept, shares = tl.exp2(top - base), tl.exp2(scores - base[:, None])
    total = total * kept + tl.sum(shares, axis=1)
    found = found * kept[:, None] + tl.dot(shares.to(values.dtype), values)
    return next_top, total, found


@triton.jit
def _used_splits(prefix, splits, least):
    """How many of a request's programs read anything; what one program finds needs no second launch."""
    return tl.minimum(splits, tl.maximum(1, tl.cdiv(prefix, least)))


@triton.jit(do_not_specialize=("width", "tiles", "splits", "least"))
def _tree_attention_kernel(
    q,  # [bs * W, heads, D]
    k,  # [bs * W, groups, D], of the nodes
    v,
    out,  # [bs * W, heads, D]
    part,  # float32 [bs, groups, W * GROUP, splits, D], or anything where nothing is split
    part_sums,  # float32 [bs, groups, W * GROUP, splits]
    k_buffer,  # [slots, groups, D]
    v_buffer,
    kv_indptr,  # [bs + 1]
    kv_indices,
    mask,  # bytes: of each request [W, prefix + W]
    mask_indptr,  # [bs + 1]
    scale,
    width,
    tiles,
    splits,
    least,  # committed tokens of a program, where a request has enough of them
    Q_ROW: tl.constexpr,
    Q_HEAD: tl.constexpr,
    KV_ROW: tl.constexpr,
    KV_HEAD: tl.constexpr,
    OUT_ROW: tl.constexpr,
    OUT_HEAD: tl.constexpr,
    K_SLOT: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_SLOT: tl.constexpr,
    V_HEAD: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    request, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tile, split = tl.program_id(2) % tiles, tl.program_id(2) // tiles
    first = tl.load(kv_indptr + request)
    prefix = (tl.load(kv_indptr + request + 1) - first).to(tl.int32)
    used = _used_splits(prefix, splits, least)
    if split >= used:
        return
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    node, head = rows // GROUP, group * GROUP + rows % GROUP
    is_node = node < width
    at = tl.arange(0, D)
    row = request * width + node
    queries = tl.load(q + row[:, None] * Q_ROW + head[:, None] * Q_HEAD + at[None, :], mask=is_node[:, None], other=0.0)

    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    found = tl.zeros([BLOCK_M, D], dtype=tl.float32)

    share = tl.cdiv(tl.cdiv(prefix, used), BLOCK_N) * BLOCK_N
    end = tl.minimum(prefix, (split + 1) * share)
    for start in range(split * share, end, BLOCK_N):
        token = start + tl.arange(0, BLOCK_N)
        is_token = token < end
        slot = tl.load(kv_indices + first + token, mask=is_token, other=0).to(tl.int64)
        keys = tl.load(
            k_buffer + slot[None, :] * K_SLOT + group * K_HEAD + at[:, None], mask=is_token[None, :], other=0.0
        )
        values = tl.load(
            v_buffer + slot[:, None] * V_SLOT + group * V_HEAD + at[None, :], mask=is_token[:, None], other=0.0
        )
        top, total, found = _attend(queries, keys, values, is_token[None, :], top, total, found, scale)

    if split == used - 1:  # the nodes themselves
        if HAS_MASK:
            mask_row = tl.load(mask_indptr + request) + node.to(tl.int64) * (prefix + width) + prefix
        for start in range(0, width, BLOCK_T):
            other = start + tl.arange(0, BLOCK_T)
            is_other = other < width
            place = (request * width + other) * KV_ROW + group * KV_HEAD
            keys = tl.load(k + place[None, :] + at[:, None], mask=is_other[None, :], other=0.0)
            values = tl.load(v + place[:, None] + at[None, :], mask=is_other[:, None], other=0.0)
            visible = is_node[:, None] & is_other[None, :]
            if HAS_MASK:
                visible &= tl.load(mask + mask_row[:, None] + other[None, :], mask=visible, other=0) != 0
            top, total, found = _attend(queries, keys, values, visible, top, total, found, scale)

    found = found / tl.where(total == 0.0, 1.0, total)[:, None]
    if used == 1:
        written = row[:, None] * OUT_ROW + head[:, None] * OUT_HEAD + at[None, :]
        tl.store(out + written, found.to(out.dtype.element_ty), mask=is_node[:, None])
    else:
        part_row = ((request * GROUPS + group) * width * GROUP + rows) * splits + split
        tl.store(part_sums + part_row, tl.where(total == 0.0, float("-inf"), top + tl.log2(total)), mask=is_node)
        has_any = is_node & (total != 0.0)
        tl.store(part + part_row[:, None] * D + at[None, :], found, mask=has_any[:, None])


@triton.jit(do_not_specialize=("width", "splits", "least"))
def _merge_kernel(
    out,
    part,
    part_sums,
    kv_indptr,
    width,
    splits,
    least,
    OUT_ROW: tl.constexpr,
    OUT_HEAD: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One program for ROWS rows of a request and group: the parts of their splits, weighed by their sums."""
    request, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    prefix = (tl.load(kv_indptr + request + 1) - tl.load(kv_indptr + request)).to(tl.int32)
    used = _used_splits(prefix, splits, least)
    if used == 1:  # written by the first launch
        return
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    split, at = tl.arange(0, SPLITS), tl.arange(0, D)
    is_row = row < width * GROUP
    part_row = ((request * GROUPS + group) * width * GROUP + row)[:, None] * splits + split[None, :]
    sums = tl.load(part_sums + part_row, mask=is_row[:, None] & (split < used)[None, :], other=float("-inf"))
    has_any = sums != float("-inf")
    # A row that sees nothing, of a request without tokens and with an empty mask, is 0 and no number minus itself.
    weights = tl.where(has_any, tl.exp2(sums - tl.max(sums, axis=1)[:, None]), 0.0)
    total = tl.sum(weights, axis=1)
    found = tl.load(part + part_row[:, :, None] * D + at[None, None, :], mask=has_any[:, :, None], other=0.0)
    found = tl.sum(found * weights[:, :, None], axis=1) / tl.where(total == 0.0, 1.0, total)[:, None]
    written = (request * width + row // GROUP) * OUT_ROW + (group * GROUP + row % GROUP) * OUT_HEAD
    tl.store(out + written[:, None] + at[None, :], found.to(out.dtype.element_ty), mask=is_row[:, None])


def attend_by_kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None,
    *,
    width: int,
    scale: float,
    splits: int | None = None,
) -> None:
    """Attention of W nodes a request; arguments as in `tree_attention.TreeAttention`.

    Args:
        q: Of the nodes, [bs * W, heads, D], the last dimension contiguous; D a power of two.
        k: Of the nodes, [bs * W, groups, D]; `v` alike.
        out: Written, [bs * W, heads, D].
        k_buffer: Of all slots, [slots, groups, D]; `v_buffer` alike.
        kv_indptr: Where each request's slots begin in `kv_indices`, [bs + 1].
        mask: Bytes, of each request [W, prefix + W] of which the last W columns are read; None where all nodes of a
            request see each other.
        mask_indptr: Where each request's mask begins, [bs + 1].
        width: W.
        scale: Of the scores.
        splits: Programs that share a request's committed tokens, up to 32; by default as many as fill the device.
    """
    rows, heads, size = q.shape
    groups, batch = k.shape[1], rows // width
    group = heads // groups
    block = block_rows(width * group)
    tiles = triton.cdiv(width * group, block)
    splits = splits_of(batch * groups * tiles, q.device) if splits is None else splits
    shared = (batch, groups, width * group, splits)
    part = torch.empty((*shared, size) if splits > 1 else 1, dtype=torch.float32, device=q.device)
    sums = torch.empty(shared if splits > 1 else 1, dtype=torch.float32, device=q.device)
    tokens, stages = block_tokens(block, size)
    least = max(tokens, least_tokens(splits))
    _tree_attention_kernel[(batch, groups, tiles * splits)](
        q, k, v, out, part, sums, k_buffer, v_buffer, kv_indptr, kv_indices,
        q if mask is None else mask.view(torch.uint8), kv_indptr if mask_indptr is None else mask_indptr,
        scale * _LOG2E, width, tiles, splits, least,
        Q_ROW=q.stride(0), Q_HEAD=q.stride(1), KV_ROW=k.stride(0), KV_HEAD=k.stride(1),
        OUT_ROW=out.stride(0), OUT_HEAD=out.stride(1), K_SLOT=k_buffer.stride(0), K_HEAD=k_buffer.stride(1),
        V_SLOT=v_buffer.stride(0), V_HEAD=v_buffer.stride(1), GROUPS=groups, GROUP=group, D=size,
        HAS_MASK=mask is not None, BLOCK_M=block, BLOCK_N=tokens,
        BLOCK_T=min(tokens, max(16, triton.next_power_of_2(width))), num_warps=4, num_stages=stages,
    )  # fmt: skip
    merging = (out, part, sums, kv_indptr, width)
    strides = {"OUT_ROW": out.stride(0), "OUT_HEAD": out.stride(1), "GROUPS": groups, "GROUP": group, "D": size}
    _load_merges(merging, strides)
    if splits > 1:
        merged = next(most for most in _MERGED_SPLITS if splits <= most)
        rows_each = _MOST_SPLITS // merged
        _merge_kernel[(batch, groups, triton.cdiv(width * group, rows_each))](
            *merging, splits, least, **strides, ROWS=rows_each, SPLITS=merged, num_warps=4
        )


def _load_merges(merging: tuple[Any, ...], strides: dict[str, int]) -> None:
    """Have all variants of the second launch: a batch's size decides which it needs. With one split they do nothing."""
    out, _, _, kv_indptr, _ = merging
    places = (tensor.data_ptr() % 16 for tensor in (out, kv_indptr))
    like = (out.dtype, out.device, kv_indptr.dtype, *places, *strides.values())
    if like not in _loaded:
        for splits in _MERGED_SPLITS:
            _merge_kernel[(1, 1, 1)](*merging, 1, 1, **strides, ROWS=_MOST_SPLITS // splits, SPLITS=splits, num_warps=4)
        _loaded.add(like)


def block_rows(rows: int) -> int:
    """Rows of a program, for so many of a request and group: a power of two from 16 to 64."""
    return min(_BLOCK_M, max(16, triton.next_power_of_2(rows)))


def block_tokens(rows: int, size: int) -> tuple[int, int]:
    """Committed tokens that a program of so many rows reads at once for heads of that size, and Triton's stages.

    Measured on an H200 by shapes and configurations. Where slots lie is read first and what they hold next, so that
    three stages have one block on its way, five have two. Heads of more than 128 get half the tokens, so that blocks
    fit into the shared memory of smaller GPUs.
    """
    tokens, stages = (32, 5) if rows >= _BLOCK_M else (128, 3)
    return (tokens if size <= 128 else tokens // 2), stages


def splits_of(programs: int, device: torch.device) -> int:
    """How many programs are to share each request's committed tokens."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return max(1, min(_MOST_SPLITS, _PROGRAMS * processors // programs))


def least_tokens(splits: int) -> int:
    """Committed tokens from which on two programs read what one could, where so many share a request's.

    Measured on an H200, for 5 to 33 nodes of 1 to 32 requests with 256 to 4,096 tokens: where there are many requests,
    so few splits, the device is full without them, and a second launch pays for long contexts only.
    """
    return 64 if splits >= 8 else 1024 // splits
