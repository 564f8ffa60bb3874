# SPDX-License-Identifier: Apache-2.0
"""What the scheduler says of itself at `/server_info`: the lanes' part."""

from __future__ import annotations

from ddtree_overlay.edits.algorithm import register_gate
from ddtree_overlay.edits.anchors import After
from ddtree_overlay.edits.base import Edit, Example, Insertion
from ddtree_overlay.edits.ddtree import DDTREE


def _report(scope: str, state: str, anchor: str, condition: str) -> Insertion:
    """Add the lanes' part to the state that is being put together.

    Args:
        scope: The method that does.
        state: Its name for the state.
        anchor: The statement behind which it has one.
        condition: Whether DDTREE serves, there.
    """
    return register_gate(
        DDTREE,
        "report:server_state",
        scope=scope,
        anchor=After(anchor),
        condition=condition,
        statement=f"{state}.update({{function}}())",
        reason="Operators and `tune` have to see which budgets really ran.",
    )


SCHEDULER_STATE = _report(
    "Scheduler.get_internal_state",
    "ret",
    'ret["last_gen_throughput"] = ...',
    "self.spec_algorithm.is_ddtree()",
)
_SUMMARY = "Report how many steps each budget verified, and what auto has planned."

INTERNAL_STATE = Edit(
    path="srt/managers/scheduler.py",
    summary=_SUMMARY,
    insertions=(SCHEDULER_STATE,),
    examples=(
        Example(
            before="""\
class Scheduler:
    def get_internal_state(self, recv_req):
        ret = dict(vars(get_global_server_args()))
        ret["last_gen_throughput"] = self.last_gen_throughput
        return GetInternalStateReqOutput(internal_state=ret)
""",
            after="""\
class Scheduler:
    def get_internal_state(self, recv_req):
        ret = dict(vars(get_global_server_args()))
        ret["last_gen_throughput"] = self.last_gen_throughput
        if self.spec_algorithm.is_ddtree():
            from sglang.srt.speculative.ddtree.report import server_state

            ret.update(server_state())
        return GetInternalStateReqOutput(internal_state=ret)
""",
        ),
    ),
)

#: For releases in which the scheduler has an object for it.
INTERNAL_STATE_APART = Edit(
    path="srt/managers/scheduler_components/internal_state.py",
    summary=_SUMMARY,
    insertions=(
        _report(
            "SchedulerInternalStateController.get_internal_state",
            "state",
            "state = ...",
            "self.scheduler.spec_algorithm.is_ddtree()",
        ),
    ),
    examples=(
        Example(
            before="""\
class SchedulerInternalStateController:
    def get_internal_state(self, recv_req):
        state = get_context().resolved_server_args_dict()
        return GetInternalStateReqOutput(internal_state=state)
""",
            after="""\
class SchedulerInternalStateController:
    def get_internal_state(self, recv_req):
        state = get_context().resolved_server_args_dict()
        if self.scheduler.spec_algorithm.is_ddtree():
            from sglang.srt.speculative.ddtree.report import server_state

            state.update(server_state())
        return GetInternalStateReqOutput(internal_state=state)
""",
        ),
    ),
)
