# SPDX-License-Identifier: Apache-2.0
"""srt/model_executor/model_runner.py: the dtype of what the drafter is fed."""

from __future__ import annotations

from ddtree_overlay.edits.anchors import After
from ddtree_overlay.edits.base import Edit, Example, insert_statements


EXAMPLE = Example(
    before="""\
class ModelRunner:
    def forward_extend(self, forward_batch):
        kwargs = {}
        if forward_batch.input_embeds is not None:
            kwargs["input_embeds"] = forward_batch.input_embeds.bfloat16()
        return self.model.forward(**kwargs)
""",
    after="""\
class ModelRunner:
    def forward_extend(self, forward_batch):
        kwargs = {}
        if forward_batch.input_embeds is not None:
            kwargs["input_embeds"] = forward_batch.input_embeds.bfloat16()
            if self.is_draft_worker and self.server_args.speculative_algorithm == "DDTREE":
                kwargs["input_embeds"] = forward_batch.input_embeds.to(self.dtype)
        return self.model.forward(**kwargs)
""",
)

MODEL_RUNNER = Edit(
    path="srt/model_executor/model_runner.py",
    summary="Feed a drafter that is not bfloat16 embeddings of its own dtype.",
    insertions=(
        insert_statements(
            "ModelRunner.forward_extend",
            After('kwargs["input_embeds"] = forward_batch.input_embeds.bfloat16()'),
            """\
if self.is_draft_worker and self.server_args.speculative_algorithm == "DDTREE":
    kwargs["input_embeds"] = forward_batch.input_embeds.to(self.dtype)
""",
            reason="The cast ends the first step of a float16 or float32 drafter, or costs it its precision.",
        ),
    ),
    examples=(EXAMPLE,),
)
