# SPDX-License-Identifier: Apache-2.0
"""What plain decoding does with NaN logits."""

from __future__ import annotations

from typing import Any


def replaces_nan(sampler: Any) -> bool:
    """Whether plain decoding replaces NaN logits before it chooses a token."""
    return bool(sampler.use_nan_detection)
