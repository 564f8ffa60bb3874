# SPDX-License-Identifier: Apache-2.0
"""A step's slots sorted on the device: which are kept, which are free, and the scheduler's table told of it.

Without this the host would do it after it has heard what was accepted, while the device has nothing to do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.speculative.ddtree.accept import Acceptance


@dataclass(frozen=True)
class Placed:
    """A batch's verify slots after its acceptance, with pages of one slot. P is the longest path."""

    #: The slots of committed nodes, in path order, request by request, int64 [bs * P]; as many count as were committed.
    kept: torch.Tensor
    #: All others, int64 [bs * W]; as many count as are not kept.
    free: torch.Tensor
    #: Committed tokens of each request after the step, int32 [bs].
    new_lens: torch.Tensor


def place(
    slots: torch.Tensor,
    acceptance: Acceptance,
    req_to_token: torch.Tensor,
    pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
) -> Placed:
    """Sort a step's slots, map the kept ones to their positions, and advance the lengths, which are changed in place.

    On a GPU this is one launch.

    Args:
        slots: Verify slots by node, int64 [bs, W].
        acceptance: What the step accepts.
        req_to_token: The scheduler's table, integers [requests, positions].
        pool_indices: Row of each request, integers [bs].
        seq_lens: Committed tokens of each request before the step, integers [bs].
    """
    if slots.is_cuda:
        from sglang.srt.speculative.ddtree.placing_kernel import place_slots as sort
    else:
        sort = place_by_request
    return sort(slots, acceptance, req_to_token, pool_indices, seq_lens)


def place_by_request(
    slots: torch.Tensor,
    acceptance: Acceptance,
    req_to_token: torch.Tensor,
    pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
) -> Placed:
    """The same request by request, the reference."""
    batch, width = slots.shape
    kept, free = slots.new_empty(acceptance.path.numel()), slots.new_empty(batch * width)
    kept_at = free_at = 0
    for request, count in enumerate(acceptance.commit_lens.tolist()):
        nodes = acceptance.path[request, :count]
        others = torch.ones(width, dtype=torch.bool)
        others[nodes] = False
        mine, rest = slots[request, nodes], slots[request, others]
        kept[kept_at : kept_at + count], free[free_at : free_at + len(rest)] = mine, rest
        kept_at, free_at = kept_at + count, free_at + len(rest)
        start = int(seq_lens[request])
        req_to_token[pool_indices[request], start : start + count] = mine.to(req_to_token.dtype)
    seq_lens += acceptance.commit_lens
    return Placed(kept, free, seq_lens.to(torch.int32))
