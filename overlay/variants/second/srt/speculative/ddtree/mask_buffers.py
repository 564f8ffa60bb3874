# SPDX-License-Identifier: Apache-2.0
"""Where an attention backend keeps the mask that its CUDA graphs read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.speculative.ddtree.tree_mask import mask_columns


if TYPE_CHECKING:
    import torch


def mask_buffer(attn_backend: Any, batch_size: int) -> torch.Tensor | None:
    """The backend's own mask buffer, which CUDA graphs read, or None when it has none for that many requests."""
    backend = getattr(attn_backend, "full_attn_backend", attn_backend)
    mask = getattr(backend, "cuda_graph_custom_mask", None)
    if mask is None:
        return None
    fits = mask.numel() // (backend.num_draft_tokens * mask_columns(backend))
    return mask if batch_size <= fits else None
