# SPDX-License-Identifier: Apache-2.0
"""KV slots that a request holds beside its committed tokens: those of one step, which allocates and frees its own."""

from __future__ import annotations

from sglang.srt.speculative.ddtree.args import draft_width


#: What the table of the lanes says of them.
HELD = "KV slots are those that a request holds beside its tokens while a step runs"


def held_slots(width: int, page_size: int) -> int:
    """Slots of one step: the wider of tree and block, and what its last page has left.

    Args:
        width: Nodes per request.
        page_size: Slots of a page.
    """
    return -(-max(width, draft_width()) // page_size) * page_size
