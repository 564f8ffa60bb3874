# SPDX-License-Identifier: Apache-2.0
"""Where an attention backend keeps the mask that its CUDA graphs read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    import torch


def mask_buffer(backend: Any, batch_size: int) -> torch.Tensor | None:
    """The buffer, uint8 [cells], or None when there is none for that many requests.

    Args:
        backend: SGLang's Triton attention backend of the target.
    """
    mask = backend.verify_mask
    return mask.buffer if mask is not None and mask.fits(batch_size) else None
