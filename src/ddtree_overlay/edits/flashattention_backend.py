# SPDX-License-Identifier: Apache-2.0
"""srt/layers/attention/flashattention_backend.py: the target's verify step follows the mask, node by node."""

from __future__ import annotations

from ddtree_overlay.edits.anchors import After, AtStart
from ddtree_overlay.edits.base import Edit, Example, insert_statements


EXAMPLE = Example(
    before="""\
class FlashAttentionBackend:
    def __init__(self, model_runner):
        self.topk = model_runner.server_args.speculative_eagle_topk or 0
        self.done = True

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        "Allocate."
        max_num_pages = self.max_context_len


class FlashAttentionMultiStepBackend:
    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        pass
""",
    after="""\
class FlashAttentionBackend:
    def __init__(self, model_runner):
        self.topk = model_runner.server_args.speculative_eagle_topk or 0
        if (
            model_runner.server_args.speculative_algorithm == "DDTREE"
            and not model_runner.is_draft_worker
        ):
            self.topk = 2  # above 1 means a tree; its shape is read from the mask
        self.done = True

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        "Allocate."
        from sglang.srt.speculative.ddtree.gates import check_flash_attention_buffers

        check_flash_attention_buffers(self, max_bs, max_num_tokens)

        max_num_pages = self.max_context_len


class FlashAttentionMultiStepBackend:
    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        pass
""",
)

FLASHATTENTION_BACKEND = Edit(
    path="srt/layers/attention/flashattention_backend.py",
    summary="Let a target's verify step attend by the mask, and check that graphs of a tree's width fit into memory.",
    insertions=(
        insert_statements(
            "FlashAttentionBackend.__init__",
            After("self.topk = model_runner.server_args.speculative_eagle_topk or 0"),
            """\
if (
    model_runner.server_args.speculative_algorithm == "DDTREE"
    and not model_runner.is_draft_worker
):
    self.topk = 2  # above 1 means a tree; its shape is read from the mask
""",
            reason="Only above 1 it reads the mask. The arguments keep 1, which pools and scheduler read.",
        ),
        insert_statements(
            "FlashAttentionBackend.init_cuda_graph_state",
            AtStart(),
            """\
from sglang.srt.speculative.ddtree.gates import check_flash_attention_buffers

check_flash_attention_buffers(self, max_bs, max_num_tokens)
""",
            reason="A budget that graphs cannot hold must fail by its name.",
            blank_after=1,
        ),
    ),
    examples=(EXAMPLE,),
)
