# SPDX-License-Identifier: Apache-2.0
"""Which of several data-parallel replicas a process serves."""

from __future__ import annotations

from typing import Any


def replica_of(worker: Any) -> int | None:
    """The replica's number, or None where there is only one."""
    rank: int | None = worker.model_runner.ps.dp_rank
    return rank
