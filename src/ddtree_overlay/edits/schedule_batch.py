# SPDX-License-Identifier: Apache-2.0
"""srt/managers/schedule_batch.py: what a step may allocate, where in it a request ends, what penalties count."""

from __future__ import annotations

from ddtree_overlay.edits.anchors import After, AtStart
from ddtree_overlay.edits.base import Edit, Example, insert_statements


#: In every release.
_PENALTIES = insert_statements(
    "ScheduleBatch.prepare_for_extend",
    After("self.sampling_info = SamplingBatchInfo.from_schedule_batch(self, self.model_config.vocab_size)"),
    """\
if self.spec_algorithm.is_ddtree():
    from sglang.srt.speculative.ddtree.earlier_output import count_earlier_output

    count_earlier_output(self.sampling_info.penalizer_orchestrator, self.reqs)
""",
    reason="The penalties of a request that was retracted would start anew, and its text be another than that of one "
    "that was not.",
)

EXAMPLE = Example(
    before="""\
class ScheduleBatch:
    def new_tokens_required_next_decode(self, requests):
        server_args = get_global_server_args()
        spec_tokens = server_args.speculative_num_draft_tokens

        return spec_tokens * len(requests)

    def prepare_for_extend(self):
        self.sampling_info = SamplingBatchInfo.from_schedule_batch(self, self.model_config.vocab_size)
""",
    after="""\
class ScheduleBatch:
    def new_tokens_required_next_decode(self, requests):
        server_args = get_global_server_args()
        spec_tokens = server_args.speculative_num_draft_tokens
        if server_args.speculative_algorithm == "DDTREE":
            spec_tokens = max(spec_tokens, server_args.speculative_dflash_block_size)

        return spec_tokens * len(requests)

    def prepare_for_extend(self):
        self.sampling_info = SamplingBatchInfo.from_schedule_batch(self, self.model_config.vocab_size)
        if self.spec_algorithm.is_ddtree():
            from sglang.srt.speculative.ddtree.earlier_output import count_earlier_output

            count_earlier_output(self.sampling_info.penalizer_orchestrator, self.reqs)
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
        _PENALTIES,
    ),
    examples=(EXAMPLE,),
)

FINISH_STATE_EXAMPLE = Example(
    before="""\
class Req:
    def update_finish_state(self, new_accepted_len=1):
        if self.finished():
            return

class ScheduleBatch:
    def prepare_for_extend(self):
        self.sampling_info = SamplingBatchInfo.from_schedule_batch(self, self.model_config.vocab_size)
""",
    after="""\
class Req:
    def update_finish_state(self, new_accepted_len=1):
        if new_accepted_len > 1:
            from sglang.srt.speculative.ddtree.ending import look_at_each_token

            if look_at_each_token(self, new_accepted_len):
                return
        if self.finished():
            return

class ScheduleBatch:
    def prepare_for_extend(self):
        self.sampling_info = SamplingBatchInfo.from_schedule_batch(self, self.model_config.vocab_size)
        if self.spec_algorithm.is_ddtree():
            from sglang.srt.speculative.ddtree.earlier_output import count_earlier_output

            count_earlier_output(self.sampling_info.penalizer_orchestrator, self.reqs)
""",
)

#: For the releases of the second worker, in which the scheduler looks at all tokens of a step at once.
FINISH_STATE = Edit(
    path=SCHEDULE_BATCH.path,
    summary="End a request at the token at which plain decoding ends it, wherever in a step that is.",
    insertions=(
        insert_statements(
            "Req.update_finish_state",
            AtStart(),
            """\
if new_accepted_len > 1:
    from sglang.srt.speculative.ddtree.ending import look_at_each_token

    if look_at_each_token(self, new_accepted_len):
        return
""",
            reason="One look at all tokens of a step takes the wrong one of several ends, or the limit for a stop "
            "before it; what comes after the stop would be emitted.",
        ),
        _PENALTIES,
    ),
    examples=(FINISH_STATE_EXAMPLE,),
)
