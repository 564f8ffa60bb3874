# SPDX-License-Identifier: Apache-2.0
"""KV slots that a request holds beside its committed tokens: what is reserved ahead, whichever lane verifies."""

from __future__ import annotations

from sglang.srt.speculative.ddtree.room import reserved_slots


#: What the table of the lanes says of them.
HELD = (
    "KV slots are those that every request holds beside its tokens, whichever budget is chosen: for the step in flight "
    "and, as wide as the widest of them, for the next"
)


def held_slots(width: int, page_size: int) -> int:  # noqa: ARG001
    """Slots that are reserved ahead; they are sized by the widest lane.

    Args:
        width: Nodes per request.
        page_size: Slots of a page.
    """
    return reserved_slots(page_size)
