# SPDX-License-Identifier: Apache-2.0
"""The batch's draft state between two steps."""

from __future__ import annotations

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    import torch
    from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2


def bonus_of(draft_input: DFlashDraftInputV2) -> torch.Tensor:
    """The last emitted token of each request, int64 [bs]."""
    found: torch.Tensor = draft_input.bonus_tokens
    return found


def next_draft_input(
    worker: DFlashWorkerV2,
    draft_input: DFlashDraftInputV2,  # noqa: ARG001
    bonus: torch.Tensor,
    new_seq_lens: torch.Tensor,
) -> DFlashDraftInputV2:
    """The batch's draft state after a step."""
    return worker._make_next_draft_input_decode(bonus_tokens=bonus, new_seq_lens=new_seq_lens)
