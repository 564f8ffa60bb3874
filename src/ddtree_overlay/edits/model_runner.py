# SPDX-License-Identifier: Apache-2.0
"""srt/model_executor/model_runner.py: the dtype of what the drafter is fed, and a mask for warm-ups."""

from __future__ import annotations

from dataclasses import replace

from ddtree_overlay.edits.anchors import After, AtStart
from ddtree_overlay.edits.base import Edit, Example, insert_statements


EXAMPLE = Example(
    before="""\
class ModelRunner:
    def forward_extend(self, forward_batch):
        kwargs = {}
        if forward_batch.input_embeds is not None:
            kwargs["input_embeds"] = forward_batch.input_embeds.bfloat16()
        return self.model.forward(**kwargs)

    def _dummy_run(self, batch_size):
        def get_spec_info():
            spec_info = None
            return spec_info

        spec_info = get_spec_info()
        return spec_info
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

    def _dummy_run(self, batch_size):
        def get_spec_info():
            spec_info = None
            return spec_info

        spec_info = get_spec_info()
        if self.server_args.speculative_algorithm == "DDTREE" and not self.is_draft_worker:
            spec_info.custom_mask = buffers.custom_mask
        return spec_info
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

WARM_UP_MASK = insert_statements(
    "ModelRunner._dummy_run",
    After("spec_info = get_spec_info()"),
    """\
if self.server_args.speculative_algorithm == "DDTREE" and not self.is_draft_worker:
    spec_info.custom_mask = buffers.custom_mask
""",
    reason="A tree is never verified without a mask, and FlashAttention reads it in a warm-up as well.",
)

_SUMMARY = "Feed a drafter that is not bfloat16 embeddings of its own dtype."

MODEL_RUNNER = Edit(
    path="srt/model_executor/model_runner.py",
    summary="Feed a drafter that is not bfloat16 embeddings of its own dtype, and give warm-ups a mask.",
    insertions=(OWN_DTYPE, WARM_UP_MASK),
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

LOGITS_ROWS = insert_statements(
    "ModelRunner.max_decode_logits_rows",
    AtStart(),
    """\
if self.spec_algorithm.is_ddtree() and not self.is_draft_worker:
    from sglang.srt.speculative.ddtree.room import most_logits_rows

    return most_logits_rows(self)
""",
    reason="All lanes write into one buffer; the widest, captured for few requests, need not have most rows.",
)

_ROWS_BEFORE = """\

    def max_decode_logits_rows(self):
        "Rows the shared logits buffer needs."
        return max(capture_bs) * self.decode_num_tokens_per_req()
"""

_ROWS_AFTER = """\

    def max_decode_logits_rows(self):
        "Rows the shared logits buffer needs."
        if self.spec_algorithm.is_ddtree() and not self.is_draft_worker:
            from sglang.srt.speculative.ddtree.room import most_logits_rows

            return most_logits_rows(self)
        return max(capture_bs) * self.decode_num_tokens_per_req()
"""

#: For releases in which all graphs write their logits into one buffer.
MODEL_RUNNER_SHARED = Edit(
    path=MODEL_RUNNER.path,
    summary="Feed a drafter that is not bfloat16 embeddings of its own dtype, and give all lanes one buffer of logits.",
    insertions=(*MODEL_RUNNER_SECOND.insertions, LOGITS_ROWS),
    examples=tuple(
        Example(before=example.before + _ROWS_BEFORE, after=example.after + _ROWS_AFTER)
        for example in MODEL_RUNNER_SECOND.examples
    ),
)
