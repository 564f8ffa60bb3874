# SPDX-License-Identifier: Apache-2.0
"""What plain decoding does with NaN logits."""

from __future__ import annotations

from typing import Any


def replaces_nan(sampler: Any) -> bool:  # noqa: ARG001
    """Whether plain decoding replaces NaN logits before it chooses a token; this release never does."""
    return False
