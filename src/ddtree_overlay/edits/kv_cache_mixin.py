# SPDX-License-Identifier: Apache-2.0
"""srt/model_executor/model_runner_kv_cache_mixin.py: room for the wider of draft block and tree, and for its states."""

from __future__ import annotations

from ddtree_overlay.edits.anchors import After
from ddtree_overlay.edits.base import Edit, Example, insert_statements


EXAMPLE = Example(
    before="""\
class ModelRunnerKVCacheMixin:
    def handle_max_mamba_cache(self, total_rest_memory):
        assert config is not None
        return total_rest_memory

    def _init_pools(self):
        if self.req_to_token_pool is None:
            extra_max_context_len = 4
            if self.server_args.speculative_num_draft_tokens is not None:
                extra_max_context_len += self.server_args.speculative_num_draft_tokens

            self.req_to_token_pool = make_pool(extra_max_context_len)
""",
    after="""\
class ModelRunnerKVCacheMixin:
    def handle_max_mamba_cache(self, total_rest_memory):
        assert config is not None
        from sglang.srt.speculative.ddtree.gates import check_recurrent_memory

        check_recurrent_memory(config.mamba2_cache_params.mamba_cache_per_req, total_rest_memory)
        return total_rest_memory

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

RECURRENT_MEMORY = insert_statements(
    "ModelRunnerKVCacheMixin.handle_max_mamba_cache",
    After("assert config is not None"),
    """\
from sglang.srt.speculative.ddtree.gates import check_recurrent_memory

check_recurrent_memory(config.mamba2_cache_params.mamba_cache_per_req, total_rest_memory)
""",
    reason="Every node of every request has a recurrent state; a budget that leaves no memory must fail by its name.",
)

KV_CACHE_MIXIN = Edit(
    path="srt/model_executor/model_runner_kv_cache_mixin.py",
    summary="Make request rows long enough for draft block and tree, and check that recurrent states fit.",
    insertions=(RECURRENT_MEMORY, ROW_COLUMNS),
    examples=(EXAMPLE,),
)

#: For releases that count the columns in a function of `mem_cache.common`.
KV_CACHE_MIXIN_COUNTED = Edit(
    path=KV_CACHE_MIXIN.path,
    summary=KV_CACHE_MIXIN.summary,
    insertions=(
        RECURRENT_MEMORY,
        ROW_COLUMNS.moved(After("extra_max_context_len = get_req_to_token_extra_context_len(...)")),
    ),
    examples=(
        Example(
            before="""\
class ModelRunnerKVCacheMixin:
    def handle_max_mamba_cache(self, total_rest_memory):
        assert config is not None
        return total_rest_memory

    def _init_pools(self):
        extra_max_context_len = get_req_to_token_extra_context_len(self.server_args)
        self.req_to_token_pool = make_pool(extra_max_context_len)
""",
            after="""\
class ModelRunnerKVCacheMixin:
    def handle_max_mamba_cache(self, total_rest_memory):
        assert config is not None
        from sglang.srt.speculative.ddtree.gates import check_recurrent_memory

        check_recurrent_memory(config.mamba2_cache_params.mamba_cache_per_req, total_rest_memory)
        return total_rest_memory

    def _init_pools(self):
        extra_max_context_len = get_req_to_token_extra_context_len(self.server_args)
        from sglang.srt.speculative.ddtree.args import extra_draft_columns

        extra_max_context_len += extra_draft_columns(self.server_args)
        self.req_to_token_pool = make_pool(extra_max_context_len)
""",
        ),
    ),
)

#: For releases that count the columns elsewhere, for every algorithm alike.
KV_CACHE_MIXIN_STATES = Edit(
    path=KV_CACHE_MIXIN.path,
    summary="Check that the recurrent states of all nodes fit.",
    insertions=(RECURRENT_MEMORY,),
    examples=(
        Example(
            before="""\
class ModelRunnerKVCacheMixin:
    def handle_max_mamba_cache(self, total_rest_memory):
        assert config is not None
        return total_rest_memory
""",
            after="""\
class ModelRunnerKVCacheMixin:
    def handle_max_mamba_cache(self, total_rest_memory):
        assert config is not None
        from sglang.srt.speculative.ddtree.gates import check_recurrent_memory

        check_recurrent_memory(config.mamba2_cache_params.mamba_cache_per_req, total_rest_memory)
        return total_rest_memory
""",
        ),
    ),
)
