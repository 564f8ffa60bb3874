# SPDX-License-Identifier: Apache-2.0
"""srt/model_executor/model_runner_kv_cache_mixin.py: room for the wider of draft block and tree."""

from __future__ import annotations

from ddtree_overlay.edits.anchors import After
from ddtree_overlay.edits.base import Edit, Example, insert_statements


EXAMPLE = Example(
    before="""\
class ModelRunnerKVCacheMixin:
    def _init_pools(self):
        if self.req_to_token_pool is None:
            extra_max_context_len = 4
            if self.server_args.speculative_num_draft_tokens is not None:
                extra_max_context_len += self.server_args.speculative_num_draft_tokens

            self.req_to_token_pool = make_pool(extra_max_context_len)
""",
    after="""\
class ModelRunnerKVCacheMixin:
    def _init_pools(self):
        if self.req_to_token_pool is None:
            extra_max_context_len = 4
            if self.server_args.speculative_num_draft_tokens is not None:
                extra_max_context_len += self.server_args.speculative_num_draft_tokens
                from sglang.srt.speculative.ddtree.args import extra_draft_columns

                extra_max_context_len += extra_draft_columns(self.server_args)

            self.req_to_token_pool = make_pool(extra_max_context_len)
""",
)

ROW_COLUMNS = insert_statements(
    "ModelRunnerKVCacheMixin._init_pools",
    After("extra_max_context_len += self.server_args.speculative_num_draft_tokens"),
    """\
from sglang.srt.speculative.ddtree.args import extra_draft_columns

extra_max_context_len += extra_draft_columns(self.server_args)
""",
    reason="Rows are sized by the verify width, but the draft writes a block that may be wider.",
)

KV_CACHE_MIXIN = Edit(
    path="srt/model_executor/model_runner_kv_cache_mixin.py",
    summary="Make request rows long enough for the draft block when it is wider than the tree.",
    insertions=(ROW_COLUMNS,),
    examples=(EXAMPLE,),
)

#: For releases that count the columns in a function of `mem_cache.common`.
KV_CACHE_MIXIN_COUNTED = Edit(
    path=KV_CACHE_MIXIN.path,
    summary=KV_CACHE_MIXIN.summary,
    insertions=(ROW_COLUMNS.moved(After("extra_max_context_len = get_req_to_token_extra_context_len(...)")),),
    examples=(
        Example(
            before="""\
class ModelRunnerKVCacheMixin:
    def _init_pools(self):
        extra_max_context_len = get_req_to_token_extra_context_len(self.server_args)
        self.req_to_token_pool = make_pool(extra_max_context_len)
""",
            after="""\
class ModelRunnerKVCacheMixin:
    def _init_pools(self):
        extra_max_context_len = get_req_to_token_extra_context_len(self.server_args)
        from sglang.srt.speculative.ddtree.args import extra_draft_columns

        extra_max_context_len += extra_draft_columns(self.server_args)
        self.req_to_token_pool = make_pool(extra_max_context_len)
""",
        ),
    ),
)
