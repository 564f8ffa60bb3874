# SPDX-License-Identifier: Apache-2.0
"""srt/layers/attention/triton_backend.py: CUDA graph buffers that hold a tree mask."""

from __future__ import annotations

from ddtree_overlay.edits.anchors import After, AtStart
from ddtree_overlay.edits.base import Edit, Example, insert_statements


EXAMPLE = Example(
    before="""\
class TritonAttnBackend:
    def init_cuda_graph_state(self, max_bs, max_num_tokens, kv_indices_buf=None):
        self.cuda_graph_attn_logits = torch.zeros(max_num_tokens)

        if not self.skip_prefill:
            self.cuda_graph_custom_mask = torch.zeros(
                (max_num_tokens * self.max_context_len),
                dtype=torch.uint8,
            )

        self.done = True


class TritonMultiStepDraftBackend:
    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        self.cuda_graph_custom_mask = torch.zeros(1)
""",
    after="""\
class TritonAttnBackend:
    def init_cuda_graph_state(self, max_bs, max_num_tokens, kv_indices_buf=None):
        if self.num_draft_tokens:
            from sglang.srt.speculative.ddtree.gates import prepare_graph_buffers

            kv_indices_buf = prepare_graph_buffers(
                self, max_bs, max_num_tokens, kv_indices_buf
            )

        self.cuda_graph_attn_logits = torch.zeros(max_num_tokens)

        if not self.skip_prefill:
            self.cuda_graph_custom_mask = torch.zeros(
                (max_num_tokens * self.max_context_len),
                dtype=torch.uint8,
            )
            from sglang.srt.speculative.ddtree.gates import grow_graph_mask

            self.cuda_graph_custom_mask = grow_graph_mask(self, max_num_tokens)

        self.done = True


class TritonMultiStepDraftBackend:
    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        self.cuda_graph_custom_mask = torch.zeros(1)
""",
)

GRAPH_BUFFERS = insert_statements(
    "TritonAttnBackend.init_cuda_graph_state",
    AtStart(),
    """\
if self.num_draft_tokens:
    from sglang.srt.speculative.ddtree.gates import prepare_graph_buffers

    kv_indices_buf = prepare_graph_buffers(
        self, max_bs, max_num_tokens, kv_indices_buf
    )
""",
    reason="A budget that graphs cannot hold must fail by its name; KV indices need one row a request.",
    blank_after=1,
)

GRAPH_MASK = insert_statements(
    "TritonAttnBackend.init_cuda_graph_state",
    After("self.cuda_graph_custom_mask = torch.zeros(...)"),
    """\
from sglang.srt.speculative.ddtree.gates import grow_graph_mask

self.cuda_graph_custom_mask = grow_graph_mask(self, max_num_tokens)
""",
    reason="A tree mask row covers the prefix and the tree, which is longer than `max_context_len`.",
)

TRITON_BACKEND = Edit(
    path="srt/layers/attention/triton_backend.py",
    summary="Check that CUDA graphs of a tree's width fit into memory, and size their buffers for a tree.",
    insertions=(GRAPH_BUFFERS, GRAPH_MASK),
    examples=(EXAMPLE,),
)

VERIFY_MASK = insert_statements(
    "TritonAttnBackend.init_cuda_graph_state",
    After("self._verify_mask = maybe_create_verify_mask(...)"),
    """\
from sglang.srt.speculative.ddtree.room import verify_mask_with_room

self._verify_mask = verify_mask_with_room(
    self._verify_mask, self.num_draft_tokens
)
""",
    reason="A step that runs past a request's end has a prefix longer than the context.",
)

#: For the releases whose mask has room for the tree itself.
TRITON_BACKEND_ROOMY = Edit(
    path=TRITON_BACKEND.path,
    summary="Check that CUDA graphs of a tree's width fit into memory, and size their buffers for a tree.",
    insertions=(GRAPH_BUFFERS, VERIFY_MASK),
    examples=(
        Example(
            before="""\
class TritonAttnBackend:
    def init_cuda_graph_state(self, max_bs, max_num_tokens, kv_indices_buf=None):
        self.cuda_graph_attn_logits = torch.zeros(max_num_tokens)
        self._verify_mask = maybe_create_verify_mask(max_bs=max_bs)
""",
            after="""\
class TritonAttnBackend:
    def init_cuda_graph_state(self, max_bs, max_num_tokens, kv_indices_buf=None):
        if self.num_draft_tokens:
            from sglang.srt.speculative.ddtree.gates import prepare_graph_buffers

            kv_indices_buf = prepare_graph_buffers(
                self, max_bs, max_num_tokens, kv_indices_buf
            )

        self.cuda_graph_attn_logits = torch.zeros(max_num_tokens)
        self._verify_mask = maybe_create_verify_mask(max_bs=max_bs)
        from sglang.srt.speculative.ddtree.room import verify_mask_with_room

        self._verify_mask = verify_mask_with_room(
            self._verify_mask, self.num_draft_tokens
        )
""",
        ),
    ),
)
