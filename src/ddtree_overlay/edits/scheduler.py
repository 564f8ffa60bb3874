# SPDX-License-Identifier: Apache-2.0
"""srt/managers/scheduler.py: SGLang 0.5.14 waits for a step before it rewrites what the step reads."""

from __future__ import annotations

from ddtree_overlay.edits.anchors import After
from ddtree_overlay.edits.base import Edit, Example, insert_statements


EXAMPLE = Example(
    before="""\
class Scheduler:
    def run_event_loop(self):
        self._war_barrier_enabled = (
            is_cuda() or envs.SGLANG_ENABLE_WAR_BARRIER.get()
        ) and not self.spec_algorithm.is_dflash()
        dispatch_event_loop(self)
""",
    after="""\
class Scheduler:
    def run_event_loop(self):
        self._war_barrier_enabled = (
            is_cuda() or envs.SGLANG_ENABLE_WAR_BARRIER.get()
        ) and not self.spec_algorithm.is_dflash()
        if self.spec_algorithm.is_ddtree():
            self._war_barrier_enabled |= (
                is_cuda() or envs.SGLANG_ENABLE_WAR_BARRIER.get()
            )
        dispatch_event_loop(self)
""",
)

SCHEDULER = Edit(
    path="srt/managers/scheduler.py",
    summary="Keep the barrier between the scheduler's writes and a step's reads, which this release lifts for DFLASH.",
    insertions=(
        insert_statements(
            "Scheduler.run_event_loop",
            After("self._war_barrier_enabled = ..."),
            """\
if self.spec_algorithm.is_ddtree():
    self._war_barrier_enabled |= (
        is_cuda() or envs.SGLANG_ENABLE_WAR_BARRIER.get()
    )
""",
            reason="A tree reads its slots and counts penalties behind the draft; DFLASH reads at a step's start.",
        ),
    ),
    examples=(EXAMPLE,),
)
