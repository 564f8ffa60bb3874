# SPDX-License-Identifier: Apache-2.0
"""srt/speculative/dflash_info.py: a verify input has the tree's links, which recurrent layers ask for."""

from __future__ import annotations

from ddtree_overlay.edits.anchors import After
from ddtree_overlay.edits.base import Edit, Example, insert_statements


EXAMPLE = Example(
    before="""\
class DFlashVerifyInput:
    draft_token_num: int
    num_tokens_per_batch: int = -1

    def __post_init__(self):
        pass
""",
    after="""\
class DFlashVerifyInput:
    draft_token_num: int
    num_tokens_per_batch: int = -1
    # DDTREE: first child and next sibling of each node.
    retrieve_next_token: torch.Tensor | None = None
    retrieve_next_sibling: torch.Tensor | None = None

    def __post_init__(self):
        pass
""",
)

LINKS = insert_statements(
    "DFlashVerifyInput",
    After("num_tokens_per_batch: ... = ..."),
    """\
# DDTREE: first child and next sibling of each node.
retrieve_next_token: torch.Tensor | None = None
retrieve_next_sibling: torch.Tensor | None = None
""",
    reason="With a tree, recurrent layers read these from every verify input, the dummy of a warm-up included.",
)

DFLASH_INFO = Edit(
    path="srt/speculative/dflash_info.py",
    summary="Give every DFLASH verify input the fields in which a tree's shape is handed to recurrent layers.",
    insertions=(LINKS,),
    examples=(EXAMPLE,),
)

#: For the releases that count the tokens of a request, not of a batch, in that place.
DFLASH_INFO_PER_REQUEST = Edit(
    path=DFLASH_INFO.path,
    summary=DFLASH_INFO.summary,
    insertions=(LINKS.moved(After("num_tokens_per_req: ... = ...")),),
    examples=(
        Example(
            before=EXAMPLE.before.replace("num_tokens_per_batch", "num_tokens_per_req"),
            after=EXAMPLE.after.replace("num_tokens_per_batch", "num_tokens_per_req"),
        ),
    ),
)
