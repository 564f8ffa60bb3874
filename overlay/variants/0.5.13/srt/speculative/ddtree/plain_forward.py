# SPDX-License-Identifier: Apache-2.0
"""The forward of a step without a draft: what the target's worker takes."""

from __future__ import annotations

from typing import Any


def plain_forward(target_worker: Any, batch: Any, mode: Any, **kwargs: Any) -> Any:
    """Decode one token of each request; `batch` holds what plain decoding would, `mode` says which states are kept."""
    batch.capture_hidden_mode = mode  # the forward takes it back
    return target_worker.forward_batch_generation(batch, is_verify=True, **kwargs)
