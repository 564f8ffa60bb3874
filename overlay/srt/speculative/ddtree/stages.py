# SPDX-License-Identifier: Apache-2.0
"""How long each stage of a decode step takes: a JSON line a step, written where `DDTREE_STAGES` points.

A stage lasts from its `mark` to the next one; the last one lasts until the next step begins, so that the stages of a
step add up to the time from step to step. Times are those of the device: CUDA events on the stream that the marks are
made on, read when they are done and never waited for. Without a GPU the host's clock stands in.

With the variable set, steps are timed only while the file `$DDTREE_STAGES.on` is there, so that one engine can be
measured with and without. Without the variable a mark costs one comparison.
"""

from __future__ import annotations

import json
import os
from collections import deque
from typing import Any

import torch
from sglang.srt.speculative.ddtree.moments import Moments


STAGES_VARIABLE = "DDTREE_STAGES"

#: The stages of a step in their order. `draft` begins a step.
DRAFT, HEAD, TREE, MASK, VERIFY, ACCEPT, COMMIT, REST = (
    "draft",  # block in, draft model
    "head",  # the target's head over the draft positions, top-K
    "tree",  # best-first tree
    "mask",  # mask, positions, slots
    "verify",  # the target's forward
    "accept",  # target tokens and accept walk
    "commit",  # KV, draft KV, recurrent states, what the scheduler gets
    "rest",  # the scheduler, until the next step begins
)


class StageTimer:
    """Events of the steps that are still under way, and the file for those that are done.

    Args:
        target: The file that gets a line a step; steps are timed while `target` + ".on" exists.
    """

    def __init__(self, target: str) -> None:
        self._target, self._switch = target, target + ".on"
        self._moments = Moments(on_gpu=torch.cuda.is_available())
        self._step: tuple[dict[str, Any], list[tuple[str, Any]]] | None = None
        self._ended: deque[tuple[dict[str, Any], list[tuple[str, Any]], Any]] = deque()

    def mark(self, stage: str, facts: dict[str, Any]) -> None:
        """Begin `stage` now; `facts` are written with the step."""
        if stage == DRAFT:
            self._begin()
        if self._step is not None:
            self._step[0].update(facts)
            self._step[1].append((stage, self._moments.now()))

    def interrupt(self) -> None:
        """Drop the step under way: what follows is no decode step, and would count as its rest."""
        if self._step is not None:
            self._moments.give_back(*(event for _, event in self._step[1]))
        self._step = None

    def _begin(self) -> None:
        """End the step before at this moment, write what is done, and begin a step if timing is switched on."""
        if self._step is not None:
            self._ended.append((*self._step, self._moments.now()))
        self._write_finished()
        self._step = ({}, []) if os.path.exists(self._switch) else None

    def _write_finished(self) -> None:
        lines = []
        while self._ended and self._ended[0][2].query():
            facts, marks, end = self._ended.popleft()
            stages: dict[str, float] = {}
            for (stage, event), (_, after) in zip(marks, [*marks[1:], ("", end)], strict=True):
                stages[stage] = stages.get(stage, 0.0) + event.elapsed_time(after)
            lines.append(json.dumps(facts | {"ms": stages}) + "\n")
            self._moments.give_back(*(event for _, event in marks), end)
        if lines:
            with open(self._target, "a") as out:
                out.writelines(lines)


_timer = StageTimer(os.environ[STAGES_VARIABLE]) if os.environ.get(STAGES_VARIABLE) else None


def mark(stage: str, **facts: Any) -> None:
    """Begin a stage of a step, if stages are timed.

    Args:
        stage: One of this module's names; `DRAFT` begins a step. A stage may be begun more than once a step.
        facts: Numbers or texts that are written with the step: `batch`, `width`, `shape`.
    """
    if _timer is not None:
        _timer.mark(stage, facts)


def interrupt() -> None:
    """Say that what comes now is no decode step (a prefill, an idle batch)."""
    if _timer is not None:
        _timer.interrupt()
