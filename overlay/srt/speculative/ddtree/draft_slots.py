# SPDX-License-Identifier: Apache-2.0
"""Where the draft KV of a step's committed nodes goes, before the host knows how many they are."""

from __future__ import annotations

import torch
from sglang.srt.speculative.ddtree.accept import Acceptance


def draft_slots(slots: torch.Tensor, acceptance: Acceptance, *, moved: bool) -> torch.Tensor:
    """The slot of each committed token, and slot 0, which holds nothing that is read, behind the last one.

    Args:
        slots: Verify slots by node, int64 [bs, W].
        acceptance: What the step accepts; S tokens a request at most.
        moved: Whether the committed nodes' KV has been moved to the front of their request's slots.

    Returns:
        int64 [bs * S].
    """
    batch, width = slots.shape
    block_size = acceptance.tokens.shape[1]
    if slots.is_cuda:
        from sglang.srt.speculative.ddtree.slots_kernel import read_draft_slots

        return read_draft_slots(slots, acceptance.path, acceptance.commit_lens, block_size, moved)
    steps = torch.arange(block_size)
    nodes = steps.clamp(max=width - 1).expand(batch, -1) if moved else acceptance.rows % width
    return torch.where(steps < acceptance.commit_lens.unsqueeze(1), slots.gather(1, nodes), 0).flatten()
