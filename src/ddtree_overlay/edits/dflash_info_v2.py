# SPDX-License-Identifier: Apache-2.0
"""srt/speculative/dflash_info_v2.py: what the second worker's steps reserve ahead and take along."""

from __future__ import annotations

from ddtree_overlay.edits.anchors import After, Before
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
        uniform_top_k = True
        for i, req in enumerate(batch.reqs):
            batch_seq_lens_cpu_t[i] = req.kv_committed_len
        self.max_top_k = max(max_top_k, 1)
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
        uniform_top_k = True
        if batch.spec_algorithm.is_ddtree():
            length_tensors = batch_seq_lens_cpu_t, cur_kv_lens_cpu_t, nxt_kv_lens_cpu_t
            batch_seq_lens_cpu_t, cur_kv_lens_cpu_t, nxt_kv_lens_cpu_t = (
                lengths.numpy() for lengths in length_tensors
            )
        for i, req in enumerate(batch.reqs):
            batch_seq_lens_cpu_t[i] = req.kv_committed_len
        if batch.spec_algorithm.is_ddtree():
            batch_seq_lens_cpu_t, cur_kv_lens_cpu_t, nxt_kv_lens_cpu_t = length_tensors
        self.max_top_k = max(max_top_k, 1)
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

WRITE_AS_ARRAYS = insert_statements(
    "DFlashDraftInputV2.prepare_for_decode",
    After("uniform_top_k = True"),
    """\
if batch.spec_algorithm.is_ddtree():
    length_tensors = batch_seq_lens_cpu_t, cur_kv_lens_cpu_t, nxt_kv_lens_cpu_t
    batch_seq_lens_cpu_t, cur_kv_lens_cpu_t, nxt_kv_lens_cpu_t = (
        lengths.numpy() for lengths in length_tensors
    )
""",
    reason="SGLang writes three lengths a request one by one; into a tensor each of them is an operation of PyTorch.",
)

AS_TENSORS_AGAIN = insert_statements(
    "DFlashDraftInputV2.prepare_for_decode",
    Before("self.max_top_k = max(max_top_k, 1)"),
    """\
if batch.spec_algorithm.is_ddtree():
    batch_seq_lens_cpu_t, cur_kv_lens_cpu_t, nxt_kv_lens_cpu_t = length_tensors
""",
    reason="What follows copies the same memory to the device, and keeps it as tensors.",
)

DFLASH_INFO_V2 = Edit(
    path="srt/speculative/dflash_info_v2.py",
    summary="Reserve slots for what is in flight and the widest step, and let a step count its root for the penalties.",
    insertions=(PENALTIES_FIELD, RESERVE, WRITE_AS_ARRAYS, AS_TENSORS_AGAIN),
    examples=(EXAMPLE,),
)
