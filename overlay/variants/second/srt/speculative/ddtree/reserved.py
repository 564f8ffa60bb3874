# SPDX-License-Identifier: Apache-2.0
"""What the scheduler has reserved ahead of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    import torch
    from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2


def reserved_lens(draft_input: DFlashDraftInputV2) -> tuple[torch.Tensor, int]:
    """The positions that the scheduler has reserved of each request, on the host, and their sum."""
    return draft_input.reserved_seq_lens_cpu, int(draft_input.reserved_seq_lens_sum)
