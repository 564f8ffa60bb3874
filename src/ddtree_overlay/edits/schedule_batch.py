# SPDX-License-Identifier: Apache-2.0
"""srt/managers/schedule_batch.py: what one decode step may allocate."""

from __future__ import annotations

from ddtree_overlay.edits.anchors import After
from ddtree_overlay.edits.base import Edit, Example, insert_statements


EXAMPLE = Example(
    before="""\
class ScheduleBatch:
    def new_tokens_required_next_decode(self, requests):
        server_args = get_global_server_args()
        spec_tokens = server_args.speculative_num_draft_tokens

        return spec_tokens * len(requests)
""",
    after="""\
class ScheduleBatch:
    def new_tokens_required_next_decode(self, requests):
        server_args = get_global_server_args()
        spec_tokens = server_args.speculative_num_draft_tokens
        if server_args.speculative_algorithm == "DDTREE":
            spec_tokens = max(spec_tokens, server_args.speculative_dflash_block_size)

        return spec_tokens * len(requests)
""",
)

SCHEDULE_BATCH = Edit(
    path="srt/managers/schedule_batch.py",
    summary="Reserve room for the draft block of a step when it is wider than the tree.",
    insertions=(
        insert_statements(
            "ScheduleBatch.new_tokens_required_next_decode",
            After("spec_tokens = server_args.speculative_num_draft_tokens"),
            """\
if server_args.speculative_algorithm == "DDTREE":
    spec_tokens = max(spec_tokens, server_args.speculative_dflash_block_size)
""",
            reason="A step drafts a block and verifies a tree; the scheduler must know the larger of the two.",
        ),
    ),
    examples=(EXAMPLE,),
)
