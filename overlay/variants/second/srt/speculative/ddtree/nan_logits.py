# SPDX-License-Identifier: Apache-2.0
"""What plain decoding does with NaN logits."""

from __future__ import annotations

from typing import Any

from sglang.srt.environ import envs


def replaces_nan(sampler: Any) -> bool:  # noqa: ARG001
    """Whether plain decoding replaces NaN logits before it chooses a token."""
    return bool(envs.SGLANG_SANITIZE_NAN_LOGITS.get())
