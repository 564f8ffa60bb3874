# SPDX-License-Identifier: Apache-2.0
"""A batch's verify slots in one kernel launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from sglang.srt.speculative.ddtree.launching import launch


#: One compiled kernel serves every batch and width: a step must not wait for a compiler.
_SIZES, _TENSORS = ("row_stride", "width"), ("req_to_token", "pool_indices", "prefix_lens", "slots")
_DRAFT_SIZES, _DRAFT_TENSORS = ("width", "steps", "block"), ("slots", "path", "commit_lens", "out")


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_TENSORS)
def _slots_kernel(
    req_to_token,  # integers [requests, positions]
    row_stride,
    pool_indices,  # integers [bs]
    prefix_lens,  # integers [bs]
    slots,  # int64 [bs, width]
    width,
    NODES: tl.constexpr,
):
    """One program reads one request's slots."""
    request = tl.program_id(0)
    nodes = tl.arange(0, NODES)
    row = tl.load(pool_indices + request).to(tl.int64) * row_stride + tl.load(prefix_lens + request)
    found = tl.load(req_to_token + row + nodes, mask=nodes < width)
    tl.store(slots + request.to(tl.int64) * width + nodes, found.to(tl.int64), mask=nodes < width)


def read_slots(
    req_to_token: torch.Tensor, pool_indices: torch.Tensor, prefix_lens: torch.Tensor, width: int
) -> torch.Tensor:
    """The slots of each request; arguments and result as in `slots.verify_slots`."""
    slots = torch.empty((pool_indices.shape[0], width), dtype=torch.int64, device=req_to_token.device)
    args = (req_to_token, req_to_token.stride(0), pool_indices, prefix_lens, slots, width)
    constants = {"NODES": max(32, triton.next_power_of_2(width))}
    key = (req_to_token.dtype, pool_indices.dtype, prefix_lens.dtype)
    launch(_slots_kernel, (slots.shape[0], 1, 1), args, constants, num_warps=1, key=key)
    return slots


@triton.jit(do_not_specialize=_DRAFT_SIZES, do_not_specialize_on_alignment=_DRAFT_TENSORS)
def _draft_slots_kernel(
    slots,  # int64 [bs, width]
    path,  # int64 [bs, steps]
    commit_lens,  # integers [bs]
    out,  # int64 [bs, block]
    width,
    steps,
    block,
    BLOCK: tl.constexpr,
    MOVED: tl.constexpr,
):
    """One program reads where one request's committed tokens are; 0 behind them."""
    request = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    committed = places < tl.load(commit_lens + request)
    nodes = places.to(tl.int64)
    if not MOVED:
        nodes = tl.load(path + request * steps + places, mask=committed, other=0)
    found = tl.load(slots + request * width + nodes, mask=committed, other=0)
    tl.store(out + request * block + places, found, mask=places < block)


def read_draft_slots(
    slots: torch.Tensor, path: torch.Tensor, commit_lens: torch.Tensor, block_size: int, moved: bool
) -> torch.Tensor:
    """The slots of committed tokens; arguments and result as in `draft_slots.draft_slots`."""
    batch, width = slots.shape
    out = torch.empty(batch * block_size, dtype=torch.int64, device=slots.device)
    args = (slots, path, commit_lens, out, width, path.shape[1], block_size)
    constants = {"BLOCK": triton.next_power_of_2(block_size), "MOVED": int(moved)}
    launch(_draft_slots_kernel, (batch, 1, 1), args, constants, num_warps=1)
    return out
