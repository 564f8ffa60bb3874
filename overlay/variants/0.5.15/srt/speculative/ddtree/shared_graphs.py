# SPDX-License-Identifier: Apache-2.0
"""What the CUDA graphs of several lanes share: in these releases one buffer of logits, and their memory."""

from __future__ import annotations

from collections.abc import Sequence

from sglang.srt.speculative.ddtree.graph_memory import grown_rows


def logits_rows(nodes: Sequence[int]) -> int:
    """Rows of the logits buffer, where lanes of so many nodes are captured (`room.most_logits_rows`)."""
    return max(nodes, default=0)


def work_rows(nodes: Sequence[int]) -> int:
    """Rows of logits as the model gives them, in the memory that graphs of one stream work in (`capturing`)."""
    return grown_rows(nodes)
