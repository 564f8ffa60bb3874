# SPDX-License-Identifier: Apache-2.0
"""Where an attention backend keeps the mask that its CUDA graphs read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.speculative.ddtree.tree_mask import mask_columns


if TYPE_CHECKING:
    import torch


def mask_buffer(backend: Any, batch_size: int) -> torch.Tensor | None:
    """The buffer, uint8 [cells], or None when there is none for that many requests.

    Args:
        backend: SGLang's Triton attention backend of the target.
    """
    mask = backend.cuda_graph_custom_mask
    if mask is None:
        return None
    fits = mask.numel() // (backend.num_draft_tokens * mask_columns(backend))
    return mask if batch_size <= fits else None
