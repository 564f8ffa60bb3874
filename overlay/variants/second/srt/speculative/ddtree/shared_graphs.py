# SPDX-License-Identifier: Apache-2.0
"""What the CUDA graphs of several lanes share: in this release buffers of one and the same size only."""

from __future__ import annotations

from collections.abc import Sequence


def logits_rows(nodes: Sequence[int]) -> int:
    """Rows of all logits buffers together, where lanes of so many nodes are captured one after the other."""
    return sum(set(nodes))


def work_rows(nodes: Sequence[int]) -> int:
    """Rows of logits as the model gives them, in the memory that graphs work in: each lane has one of its own."""
    return sum(nodes)
