# SPDX-License-Identifier: Apache-2.0
"""A step's slots sorted in one kernel launch, one program a request."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from sglang.srt.speculative.ddtree.accept import Acceptance
from sglang.srt.speculative.ddtree.launching import LEAST_REQUESTS, launch
from sglang.srt.speculative.ddtree.placing import Placed


#: One compiled kernel serves every batch and width: a step must not wait for a compiler.
_SIZES = ("row_stride", "width", "steps", "batch")
_TENSORS = ("slots", "path", "commit_lens", "req_to_token", "pool_indices", "seq_lens", "kept", "free", "new_lens")


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_TENSORS)
def _place_kernel(
    slots,  # int64 [bs, width]
    path,  # int64 [bs, steps]
    commit_lens,  # int32 [bs]
    req_to_token,  # integers [requests, positions]
    pool_indices,  # integers [bs]
    seq_lens,  # integers [bs], advanced here
    kept,  # int64 [bs * steps] out
    free,  # int64 [bs * width] out
    new_lens,  # int32 [bs] out
    row_stride,
    width,
    steps,
    batch,
    NODES: tl.constexpr,  # a power of two, at least the width
    REQUESTS: tl.constexpr,  # a power of two, at least the batch
):
    request = tl.program_id(0)
    requests = tl.arange(0, REQUESTS)
    lens = tl.load(commit_lens + requests, mask=requests < batch, other=0)
    before = tl.sum(tl.where(requests < request, lens, 0), axis=0)
    count = tl.load(commit_lens + request)
    length = tl.load(seq_lens + request)
    row = tl.load(pool_indices + request).to(tl.int64) * row_stride + length

    nodes = tl.arange(0, NODES)
    own = slots + request.to(tl.int64) * width
    others = nodes < width
    for step in range(count):
        node = tl.load(path + request.to(tl.int64) * steps + step)
        slot = tl.load(own + node)
        tl.store(kept + before + step, slot)
        tl.store(req_to_token + row + step, slot.to(req_to_token.dtype.element_ty))
        others = others & (nodes != node)
    places = tl.cumsum(others.to(tl.int32), axis=0) - 1
    found = tl.load(own + nodes, mask=nodes < width, other=0)
    tl.store(free + (request * width - before) + places, found, mask=others)
    tl.store(seq_lens + request, length + count)
    tl.store(new_lens + request, (length + count).to(tl.int32))


def place_slots(
    slots: torch.Tensor,
    acceptance: Acceptance,
    req_to_token: torch.Tensor,
    pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
) -> Placed:
    """Sort a step's slots; arguments and result as in `placing.place`."""
    (batch, width), steps = slots.shape, acceptance.path.shape[1]
    kept, free = slots.new_empty(batch * steps), slots.new_empty(batch * width)
    new_lens = torch.empty(batch, dtype=torch.int32, device=slots.device)
    tensors = (
        slots,
        acceptance.path,
        acceptance.commit_lens,
        req_to_token,
        pool_indices,
        seq_lens,
        kept,
        free,
        new_lens,
    )
    constants = {
        "NODES": max(32, triton.next_power_of_2(width)),
        "REQUESTS": max(LEAST_REQUESTS, triton.next_power_of_2(batch)),
    }
    key = (req_to_token.dtype, pool_indices.dtype, seq_lens.dtype)
    sizes = (req_to_token.stride(0), width, steps, batch)
    launch(_place_kernel, (batch, 1, 1), tensors + sizes, constants, num_warps=1, key=key)
    return Placed(kept, free, new_lens)
