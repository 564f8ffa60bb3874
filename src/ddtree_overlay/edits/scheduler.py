# SPDX-License-Identifier: Apache-2.0
"""srt/managers/scheduler.py: SGLang 0.5.14 waits for a step before it rewrites what the step reads."""

from __future__ import annotations

from ddtree_overlay.edits.anchors import After
from ddtree_overlay.edits.base import Edit, Example, insert_statements
from ddtree_overlay.edits.internal_state import SCHEDULER_STATE


EXAMPLE = Example(
    before="""\
class Scheduler:
    def run_event_loop(self):
        self._war_barrier_enabled = (
            is_cuda() or envs.SGLANG_ENABLE_WAR_BARRIER.get()
        ) and not self.spec_algorithm.is_dflash()
        dispatch_event_loop(self)

    def get_internal_state(self, recv_req):
        ret["last_gen_throughput"] = self.metrics_reporter.last_gen_throughput
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

    def get_internal_state(self, recv_req):
        ret["last_gen_throughput"] = self.metrics_reporter.last_gen_throughput
        if self.spec_algorithm.is_ddtree():
            from sglang.srt.speculative.ddtree.report import server_state

            ret.update(server_state())
""",
)

SCHEDULER = Edit(
    path="srt/managers/scheduler.py",
    summary="Keep the barrier between the scheduler's writes and a step's reads, which this release lifts for DFLASH; "
    "report the lanes.",
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
        SCHEDULER_STATE,
    ),
    examples=(EXAMPLE,),
)
