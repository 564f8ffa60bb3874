# SPDX-License-Identifier: Apache-2.0
"""`--speculative-ddtree-budget auto`: the plan of the first tensor-parallel rank, followed by all at the same step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.speculative.ddtree.choice import PERIOD, Chooser, Step
from sglang.srt.speculative.ddtree.round_times import Choice


if TYPE_CHECKING:
    from sglang.srt.speculative.ddtree.accept import Acceptance
    from sglang.srt.speculative.ddtree.observing import Observer
    from sglang.srt.speculative.ddtree.tree import Tree

#: Steps that are all counted. Later every other one is, unless few are observed: a launch costs the host as much as a
#: tree.
_ALL_COUNTED = 512
#: Every so many steps trees are grown to the widest lane, to be told what that would accept.
_WIDEST = 8


class Auto:
    """Chooses each step's lane and learns from the steps.

    Ranks count the same steps. When the plan's period is over, the first rank plans anew and tells the others over
    the group of the host, so that clocks that differ cannot make ranks verify different widths.

    Args:
        chooser: Plans; only the first rank's ever learns anything.
        observer: The first rank's.
        group: The tensor-parallel group.
        tell: Called on the first rank with the steps that a new plan was made from.
    """

    def __init__(
        self, chooser: Chooser, observer: Observer | None, group: Any, tell: Callable[[list[Step]], None] | None = None
    ) -> None:
        self.chooser = chooser
        self._observer = observer if group.rank_in_group == 0 else None
        self._group = group
        self._tell = tell
        self._left = chooser.period
        self._steps = 0
        self._running: tuple[int, Choice] | None = None
        self._bucket = 0  # of no batch yet
        self._is_planned = False
        self._widths = chooser.rates.widths

    def begin(self, batch_size: int) -> Choice:
        """A step of so many requests begins, before its draft: what it is to verify."""
        bucket = self.chooser.times.bucket(batch_size)
        choice = self.chooser.plan[bucket]
        self._running, self._is_planned = (batch_size, choice), False
        if bucket != self._bucket:
            self._bucket, self._left = bucket, min(self._left, self.chooser.lasts[bucket])
        if self._observer is not None and self._is_observed:
            self._observer.begin()
        return choice

    def grown_width(self, choice: Choice) -> int:
        """How wide the trees of the step that runs are to be grown, at least as wide as they are verified.

        The next wider lane is asked about in every step that is counted, and all of them now and then.
        """
        if choice.shape != "tree" or not self._is_counted:
            return choice.width
        if self._steps % _WIDEST == 0:
            return max(self._widths[-1], choice.width)
        return min((width for width in self._widths if width > choice.width), default=choice.width)

    def count(self, tree: Tree, acceptance: Acceptance, choices: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Count the step that runs, as soon as its acceptance is known; arguments as in `tally.tally_step`."""
        if self._observer is not None and self._is_counted:
            self._observer.count(tree, acceptance, choices)

    def warm_up(self, tree: Tree, acceptance: Acceptance, choices: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Launch what `count` would; nothing is learned."""
        if self._observer is not None:
            self._observer.warm_up(tree, acceptance, choices)

    def end(self) -> None:
        """The step has been launched to its end; the period may be over with it."""
        if self._running is None:
            return
        batch_size, choice = self._running
        self._running = None
        if self._observer is not None and self._is_observed:
            self._observer.end(batch_size, choice)
        elif self._observer is not None:
            self._observer.pass_over(choice)
            self.chooser.times.pass_over(self._bucket)
        self._steps += 1
        self._left -= 1
        if self._left <= 0:
            if self._observer is not None:
                self._observer.end_period()
            if not self._is_planned:
                self._plan()
            self._left = self.chooser.period

    def meanwhile(self) -> None:
        """The step that runs has been launched, and the host is about to wait for it: plan what comes behind it."""
        if self._running is not None and self._left == 1:
            self._plan()
            self._is_planned = True

    def interrupt(self) -> None:
        """A prefill, an idle step or a step of somebody else's choice runs: nothing to learn from."""
        self._running = None
        if self._observer is not None:
            self._observer.interrupt()

    @property
    def _is_counted(self) -> bool:
        every = self._steps < _ALL_COUNTED or self.chooser.period > PERIOD
        return self._running is not None and self._is_observed and (every or self._steps % 2 == 0)

    @property
    def _is_observed(self) -> bool:
        return self._left <= PERIOD

    def _plan(self) -> None:
        steps: list[Step] = []
        if self._observer is not None:
            steps = self._observer.collect()
            self.chooser.observe(steps)
            self.chooser.replan(self._bucket)
        if self._group.world_size > 1:
            plan = torch.tensor(self.chooser.encoded(), dtype=torch.int64)
            torch.distributed.broadcast(plan, src=self._group.first_rank, group=self._group.cpu_group)
            self.chooser.adopt(plan.tolist())
        if self._observer is not None and self._tell is not None:
            self._tell(steps)  # last: a report that fails leaves no rank waiting
