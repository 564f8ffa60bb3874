# SPDX-License-Identifier: Apache-2.0
"""srt/managers/scheduler_components/weight_updater.py: which weights an update may be of (0.5.21 and later)."""

from __future__ import annotations

from ddtree_overlay.edits.algorithm import register_gate
from ddtree_overlay.edits.anchors import After
from ddtree_overlay.edits.base import Edit, Example
from ddtree_overlay.edits.ddtree import DDTREE


_SERVES = "self.tp_worker.model_runner.spec_algorithm.is_ddtree()"

WEIGHT_UPDATER = Edit(
    path="srt/managers/scheduler_components/weight_updater.py",
    summary="Leave the drafter its weights; refuse an update that names it.",
    insertions=(
        register_gate(
            DDTREE,
            "drafter_weights:runners_of",
            scope="SchedulerWeightUpdaterManager._select_runners",
            anchor=After("roles = ..."),
            condition=_SERVES,
            statement="return {function}(self, selector)",
            reason="A worker that is asked for its runners does not hear whether the caller named the drafter.",
        ),
        register_gate(
            DDTREE,
            "drafter_weights:refusal",
            scope="SchedulerWeightUpdaterManager.begin_weight_update",
            anchor=After("if self._session is not None: ..."),
            condition=f'recv_req.selector == "draft" and {_SERVES}',
            statement="return BeginWeightUpdateReqOutput(success=False, message={function}())",
            reason="What opens a session asks its runners for no answer, and would report success.",
        ),
    ),
    examples=(
        Example(
            before="""\
class SchedulerWeightUpdaterManager:
    def _select_runners(self, selector="all"):
        roles = _parse_runner_selector(selector)
        runners = []
        return runners

    def begin_weight_update(self, recv_req):
        if self._session is not None:
            return BeginWeightUpdateReqOutput(success=False, message="a session is open")
        for _, runner in self._select_runners(recv_req.selector):
            runner.weight_updater.begin_weight_update()
""",
            after="""\
class SchedulerWeightUpdaterManager:
    def _select_runners(self, selector="all"):
        roles = _parse_runner_selector(selector)
        if self.tp_worker.model_runner.spec_algorithm.is_ddtree():
            from sglang.srt.speculative.ddtree.drafter_weights import runners_of

            return runners_of(self, selector)
        runners = []
        return runners

    def begin_weight_update(self, recv_req):
        if self._session is not None:
            return BeginWeightUpdateReqOutput(success=False, message="a session is open")
        if recv_req.selector == "draft" and self.tp_worker.model_runner.spec_algorithm.is_ddtree():
            from sglang.srt.speculative.ddtree.drafter_weights import refusal

            return BeginWeightUpdateReqOutput(success=False, message=refusal())
        for _, runner in self._select_runners(recv_req.selector):
            runner.weight_updater.begin_weight_update()
""",
        ),
    ),
)
