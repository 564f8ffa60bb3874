# SPDX-License-Identifier: Apache-2.0
"""srt/mem_cache/allocation_sizing.py: columns of `req_to_token` behind the context's end."""

from __future__ import annotations

from dataclasses import replace

from ddtree_overlay.edits.anchors import Before
from ddtree_overlay.edits.base import Edit, Example, insert_statements


EXAMPLE = Example(
    before="""\
def get_req_to_token_extra_context_len(server_args):
    extra = 4 + (server_args.max_speculative_num_draft_tokens or 0)
    return extra
""",
    after="""\
def get_req_to_token_extra_context_len(server_args):
    extra = 4 + (server_args.max_speculative_num_draft_tokens or 0)
    from sglang.srt.speculative.ddtree.room import row_headroom

    extra = row_headroom(extra, server_args.page_size)
    return extra
""",
)

ROW_HEADROOM = insert_statements(
    "get_req_to_token_extra_context_len",
    Before("return extra"),
    """\
from sglang.srt.speculative.ddtree.room import row_headroom

extra = row_headroom(extra, server_args.page_size)
""",
    reason="Near the context's end the reserve of two steps would run into the row of the next request.",
)

ALLOCATION_SIZING = Edit(
    path="srt/mem_cache/allocation_sizing.py",
    summary="Give each request's row room for all slots that are reserved ahead.",
    insertions=(ROW_HEADROOM,),
    examples=(EXAMPLE,),
)

#: For the releases in which it stands beside the allocation itself.
ALLOCATION_SIZING_COMMON = Edit(
    path="srt/mem_cache/common.py",
    summary=ALLOCATION_SIZING.summary,
    insertions=(ROW_HEADROOM,),
    examples=(EXAMPLE,),
)

#: For the releases that have the page size at hand, and no `server_args`.
ALLOCATION_SIZING_PUBLISHED = Edit(
    path=ALLOCATION_SIZING.path,
    summary=ALLOCATION_SIZING.summary,
    insertions=(replace(ROW_HEADROOM, code=ROW_HEADROOM.code.replace("server_args.page_size", "page_size")),),
    examples=(
        Example(
            before="""\
def get_req_to_token_extra_context_len():
    extra = 4 + (max_speculative_num_draft_tokens() or 0)
    page_size = get_schedule().page_size
    return extra
""",
            after="""\
def get_req_to_token_extra_context_len():
    extra = 4 + (max_speculative_num_draft_tokens() or 0)
    page_size = get_schedule().page_size
    from sglang.srt.speculative.ddtree.room import row_headroom

    extra = row_headroom(extra, page_size)
    return extra
""",
        ),
    ),
)
