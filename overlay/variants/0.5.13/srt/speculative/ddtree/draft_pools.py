# SPDX-License-Identifier: Apache-2.0
"""Which of its runner's pools a draft's forward batch carries: none, the forward takes them from the runner."""

from __future__ import annotations

from typing import Any


def draft_pools(_runner: Any) -> dict[str, Any]:
    """Fields of the forward batch of the drafter's model runner."""
    return {}
