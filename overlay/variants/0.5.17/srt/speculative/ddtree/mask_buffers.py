# SPDX-License-Identifier: Apache-2.0
"""Where an attention backend keeps the mask that its CUDA graphs read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    import torch


def mask_buffer(attn_backend: Any, batch_size: int) -> torch.Tensor | None:
    """The backend's own mask buffer, which CUDA graphs read, or None when it has none for that many requests."""
    mask = attn_backend.verify_mask
    return mask.buffer if mask is not None and mask.fits(batch_size) else None
