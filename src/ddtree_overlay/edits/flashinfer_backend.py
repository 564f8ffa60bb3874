# SPDX-License-Identifier: Apache-2.0
"""srt/layers/attention/flashinfer_backend.py: CUDA graph buffers of a tree's width."""

from __future__ import annotations

from ddtree_overlay.edits.anchors import AtStart
from ddtree_overlay.edits.base import Edit, Example, insert_statements


EXAMPLE = Example(
    before="""\
class FlashInferAttnBackend:
    def init_cuda_graph_state(self, max_bs, max_num_tokens, kv_indices_buf=None):
        if kv_indices_buf is None:
            cuda_graph_kv_indices = torch.zeros(max_num_tokens)


class FlashInferMultiStepDraftBackend:
    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        pass
""",
    after="""\
class FlashInferAttnBackend:
    def init_cuda_graph_state(self, max_bs, max_num_tokens, kv_indices_buf=None):
        from sglang.srt.speculative.ddtree.gates import prepare_flashinfer_buffers

        kv_indices_buf = prepare_flashinfer_buffers(
            self, max_bs, max_num_tokens, kv_indices_buf
        )

        if kv_indices_buf is None:
            cuda_graph_kv_indices = torch.zeros(max_num_tokens)


class FlashInferMultiStepDraftBackend:
    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        pass
""",
)

FLASHINFER_BACKEND = Edit(
    path="srt/layers/attention/flashinfer_backend.py",
    summary="Check that CUDA graphs of a tree's width fit into memory, and size their KV indices by request.",
    insertions=(
        insert_statements(
            "FlashInferAttnBackend.init_cuda_graph_state",
            AtStart(),
            """\
from sglang.srt.speculative.ddtree.gates import prepare_flashinfer_buffers

kv_indices_buf = prepare_flashinfer_buffers(
    self, max_bs, max_num_tokens, kv_indices_buf
)
""",
            reason="A budget that graphs cannot hold must fail by its name; KV indices need one row a request.",
            blank_after=1,
        ),
    ),
    examples=(EXAMPLE,),
)
