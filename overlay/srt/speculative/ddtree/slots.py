# SPDX-License-Identifier: Apache-2.0
"""The slots that a step verifies its nodes in, out of the scheduler's table."""

from __future__ import annotations

import torch


def verify_slots(
    req_to_token: torch.Tensor, pool_indices: torch.Tensor, prefix_lens: torch.Tensor, width: int
) -> torch.Tensor:
    """The slots of each request's next `width` positions, int64 [bs, width], in a tensor of our own.

    On a GPU this is one launch.

    Args:
        req_to_token: The scheduler's table, integers [requests, positions].
        pool_indices: Row of each request, integers [bs].
        prefix_lens: Committed tokens of each request, integers [bs].
        width: Nodes per request; node i is verified in slot i.
    """
    if req_to_token.is_cuda:
        from sglang.srt.speculative.ddtree.slots_kernel import read_slots as read
    else:
        read = slots_by_index
    return read(req_to_token, pool_indices, prefix_lens, width)


def slots_by_index(
    req_to_token: torch.Tensor, pool_indices: torch.Tensor, prefix_lens: torch.Tensor, width: int
) -> torch.Tensor:
    """The same by tensor operations, the reference."""
    places = prefix_lens.unsqueeze(1) + torch.arange(width, device=prefix_lens.device)
    return req_to_token[pool_indices.unsqueeze(1), places].to(torch.int64)
