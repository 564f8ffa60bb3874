# SPDX-License-Identifier: Apache-2.0
"""What else a verify input says about a step."""

from __future__ import annotations

from typing import Any


def plan_fields(target_worker: Any, batch: Any, lens: Any, slots: Any) -> dict[str, Any]:  # noqa: ARG001
    """Further fields of a verify input; this release has none."""
    return {}
