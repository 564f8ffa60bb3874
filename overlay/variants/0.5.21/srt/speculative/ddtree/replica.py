# SPDX-License-Identifier: Apache-2.0
"""Which of several data-parallel replicas a process serves."""

from __future__ import annotations

from typing import Any

from sglang.srt.runtime_context import get_parallel


def replica_of(worker: Any) -> int | None:  # noqa: ARG001
    """The replica's number, or None where there is only one."""
    rank: int | None = get_parallel().dp_rank
    return rank
