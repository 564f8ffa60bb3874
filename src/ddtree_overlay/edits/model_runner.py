# SPDX-License-Identifier: Apache-2.0
"""srt/model_executor/model_runner.py: the dtype of what the drafter is fed."""

from __future__ import annotations

from dataclasses import replace

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

OWN_DTYPE = insert_statements(
    "ModelRunner.forward_extend",
    After('kwargs["input_embeds"] = forward_batch.input_embeds.bfloat16()'),
    """\
if self.is_draft_worker and self.server_args.speculative_algorithm == "DDTREE":
    kwargs["input_embeds"] = forward_batch.input_embeds.to(self.dtype)
""",
    reason="The cast ends the first step of a float16 or float32 drafter, or costs it its precision.",
)

_SUMMARY = "Feed a drafter that is not bfloat16 embeddings of its own dtype."

MODEL_RUNNER = Edit(
    path="srt/model_executor/model_runner.py",
    summary=_SUMMARY,
    insertions=(OWN_DTYPE,),
    examples=(EXAMPLE,),
)

#: For releases that collect the arguments of `forward` in a method of their own.
MODEL_RUNNER_SECOND = Edit(
    path=MODEL_RUNNER.path,
    summary=_SUMMARY,
    insertions=(
        replace(
            OWN_DTYPE,
            scope="ModelRunner._extend_forward_kwargs",
            code="""\
if self.is_draft_worker and self.spec_algorithm.is_ddtree():
    kwargs["input_embeds"] = forward_batch.input_embeds.to(self.dtype)
""",
        ),
    ),
    examples=(
        Example(
            before="""\
class ModelRunner:
    def _extend_forward_kwargs(self, forward_batch, pp_proxy_tensors):
        kwargs = self._pp_kwargs(pp_proxy_tensors)
        if forward_batch.input_embeds is not None:
            kwargs["input_embeds"] = forward_batch.input_embeds.bfloat16()
        return kwargs
""",
            after="""\
class ModelRunner:
    def _extend_forward_kwargs(self, forward_batch, pp_proxy_tensors):
        kwargs = self._pp_kwargs(pp_proxy_tensors)
        if forward_batch.input_embeds is not None:
            kwargs["input_embeds"] = forward_batch.input_embeds.bfloat16()
            if self.is_draft_worker and self.spec_algorithm.is_ddtree():
                kwargs["input_embeds"] = forward_batch.input_embeds.to(self.dtype)
        return kwargs
""",
        ),
    ),
)
