# SPDX-License-Identifier: Apache-2.0
"""srt/speculative/dflash_info_v2.py: what the second worker's steps reserve ahead and take along."""

from __future__ import annotations

from ddtree_overlay.edits.anchors import After
from ddtree_overlay.edits.base import Edit, Example, add_field, insert_statements


EXAMPLE = Example(
    before="""\
class DFlashDraftInputV2:
    max_top_k: int = 1
    uniform_top_k_value: Optional[int] = None

    def prepare_for_decode(self, batch):
        # For DFLASH, each decode step needs a fixed-size verify block.
        block_size = int(get_spec().speculative_num_draft_tokens)
        if block_size <= 0:
            raise ValueError("DFLASH invalid")
""",
    after="""\
class DFlashDraftInputV2:
    max_top_k: int = 1
    uniform_top_k_value: Optional[int] = None
    penalizer_orchestrator: Optional[object] = None

    def prepare_for_decode(self, batch):
        # For DFLASH, each decode step needs a fixed-size verify block.
        block_size = int(get_spec().speculative_num_draft_tokens)
        if batch.spec_algorithm.is_ddtree():
            from sglang.srt.speculative.ddtree.room import step_slots

            block_size = step_slots()
            self.penalizer_orchestrator = batch.sampling_info.penalizer_orchestrator
        if block_size <= 0:
            raise ValueError("DFLASH invalid")
""",
)

PENALTIES_FIELD = add_field(
    "DFlashDraftInputV2",
    ("penalizer_orchestrator: Optional[object] = None",),
    after="uniform_top_k_value",
    reason="A step's own copy of the sampling parameters comes without the penalties' counters; it counts its root.",
)

RESERVE = insert_statements(
    "DFlashDraftInputV2.prepare_for_decode",
    After("block_size = int(...)"),
    """\
if batch.spec_algorithm.is_ddtree():
    from sglang.srt.speculative.ddtree.room import step_slots

    block_size = step_slots()
    self.penalizer_orchestrator = batch.sampling_info.penalizer_orchestrator
""",
    reason="A step writes a draft block and a tree; SGLang reserves twice as much, for the step in flight too.",
)

DFLASH_INFO_V2 = Edit(
    path="srt/speculative/dflash_info_v2.py",
    summary="Reserve slots for what is in flight and the widest step, and let a step count its root for the penalties.",
    insertions=(PENALTIES_FIELD, RESERVE),
    examples=(EXAMPLE,),
)
