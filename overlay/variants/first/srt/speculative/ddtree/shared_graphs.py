# SPDX-License-Identifier: Apache-2.0
"""What the CUDA graphs of several lanes share: in these releases a buffer that is large enough, and their memory."""

from __future__ import annotations

from collections.abc import Sequence

from sglang.srt.speculative.ddtree.graph_memory import grown_rows


def logits_rows(nodes: Sequence[int]) -> int:
    """Rows of all logits buffers together, where lanes of so many nodes are captured one after the other."""
    return grown_rows(nodes)


def work_rows(nodes: Sequence[int]) -> int:
    """Rows of logits as the model gives them, in the memory that graphs of one stream work in (`capturing`)."""
    return grown_rows(nodes)
