# SPDX-License-Identifier: Apache-2.0
"""srt/mem_cache/allocation_sizing.py: columns of `req_to_token` behind the context's end, and slots of a step."""

from __future__ import annotations

from dataclasses import replace

from ddtree_overlay.edits.anchors import AtStart, Before
from ddtree_overlay.edits.base import Edit, Example, insert_statements


EXAMPLE = Example(
    before="""\
def get_alloc_reserve_per_decode(server_args=None):
    "KV length reserved per request."
    return 2 * get_alloc_len_per_decode(server_args)


def get_req_to_token_extra_context_len(server_args):
    extra = 4 + (server_args.max_speculative_num_draft_tokens or 0)
    return extra
""",
    after="""\
def get_alloc_reserve_per_decode(server_args=None):
    "KV length reserved per request."
    from sglang.srt.speculative.ddtree.gates import is_ddtree_on

    if is_ddtree_on():
        from sglang.srt.speculative.ddtree.room import step_slots

        return 2 * step_slots()
    return 2 * get_alloc_len_per_decode(server_args)


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
    reason="Near the context's end the reserve would run into the row of the next request.",
)

RESERVE = insert_statements(
    "get_alloc_reserve_per_decode",
    AtStart(),
    """\
from sglang.srt.speculative.ddtree.gates import is_ddtree_on

if is_ddtree_on():
    from sglang.srt.speculative.ddtree.room import step_slots

    return 2 * step_slots()
""",
    reason="The scheduler retracts requests when less is free than steps reserve: here as much as they do.",
)

ALLOCATION_SIZING = Edit(
    path="srt/mem_cache/allocation_sizing.py",
    summary="Count the slots that are reserved ahead, and give each request's row room for them.",
    insertions=(RESERVE, ROW_HEADROOM),
    examples=(EXAMPLE,),
)

#: For the releases in which it stands beside the allocation itself.
ALLOCATION_SIZING_COMMON = Edit(
    path="srt/mem_cache/common.py",
    summary=ALLOCATION_SIZING.summary,
    insertions=(RESERVE, ROW_HEADROOM),
    examples=(EXAMPLE,),
)

#: For the releases that have the page size at hand, and no `server_args`.
ALLOCATION_SIZING_PUBLISHED = Edit(
    path=ALLOCATION_SIZING.path,
    summary=ALLOCATION_SIZING.summary,
    insertions=(
        RESERVE,
        replace(ROW_HEADROOM, code=ROW_HEADROOM.code.replace("server_args.page_size", "page_size")),
    ),
    examples=(
        Example(
            before="""\
def get_alloc_reserve_per_decode():
    return 2 * get_alloc_len_per_decode()


def get_req_to_token_extra_context_len():
    extra = 4 + (max_speculative_num_draft_tokens() or 0)
    page_size = get_schedule().page_size
    return extra
""",
            after="""\
def get_alloc_reserve_per_decode():
    from sglang.srt.speculative.ddtree.gates import is_ddtree_on

    if is_ddtree_on():
        from sglang.srt.speculative.ddtree.room import step_slots

        return 2 * step_slots()
    return 2 * get_alloc_len_per_decode()


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
