# SPDX-License-Identifier: Apache-2.0
"""What decode steps take and tell, brought to the host without waiting for the device.

A step is timed by two events, before the draft and after the commit, and counted into a row of a device buffer. At the
end of a plan's period the rows are copied to pinned memory behind another event; whoever asks later gets the periods
whose copy has arrived.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.speculative.ddtree.choice import PERIOD, Choice, Step
from sglang.srt.speculative.ddtree.moments import Moments
from sglang.srt.speculative.ddtree.tally import columns, tally_step


if TYPE_CHECKING:
    from sglang.srt.speculative.ddtree.accept import Acceptance
    from sglang.srt.speculative.ddtree.tree import Tree

#: Requests of a step that are counted; of a larger batch the first ones.
_COUNTED = 64
#: Periods that may be on their way; one more is not observed.
_PERIODS = 4


@dataclass
class _Seen:
    """A step that has been launched."""

    batch_size: int
    choice: Choice
    start: Any
    end: Any
    #: The end of the step before, if nothing came between.
    before: Any
    #: Whether the decode step before had the same choice: the first step of one runs into cold caches, and into kernels
    #: that have to be compiled.
    is_warm: bool
    #: Row of the period's buffer, if the step was counted, and how wide its trees were grown.
    row: int | None
    grown: int


@dataclass
class _Period:
    steps: list[_Seen] = field(default_factory=list)
    #: The rows on the host, float32 [steps, requests, columns].
    counts: torch.Tensor | None = None
    arrived: Any = None


class Observer:
    """Observes decode steps.

    Args:
        widths: Tree widths to count for, ascending.
        device: Where trees are.
    """

    def __init__(self, widths: Sequence[int], device: Any) -> None:
        on_gpu = torch.device(device).type == "cuda"
        self._moments = Moments(on_gpu=on_gpu)
        self._widths = torch.tensor(widths, dtype=torch.int32, device=device)
        self._host_widths = tuple(widths)
        shape = (PERIOD, _COUNTED, columns(len(widths)))
        self._counts = torch.zeros(shape, dtype=torch.float32, device=device)
        self._buffers = [torch.zeros(shape, dtype=torch.float32, pin_memory=on_gpu) for _ in range(_PERIODS)]
        self._on_their_way: deque[_Period] = deque()
        self._period = _Period()
        self._start: Any = None
        self._counted: int | None = None
        self._grown = 0
        self._last_end: Any = None
        self._last_choice: Choice | None = None

    def begin(self) -> None:
        """A step begins: nothing of it has been launched."""
        self._start, self._counted = self._moments.now(), None

    def count(self, tree: Tree, acceptance: Acceptance, choices: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Count the step that runs: one launch. Arguments as in `tally.tally_step`."""
        if len(self._period.steps) < PERIOD:
            self._counted = len(self._period.steps)
            self._grown = tree.grown_scores.shape[1]
            tally_step(self._counts[self._counted], self._widths, tree, acceptance, choices)

    def warm_up(self, tree: Tree, acceptance: Acceptance, choices: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Launch what `count` would, into a row that the first counted step writes anew."""
        tally_step(self._counts[0], self._widths, tree, acceptance, choices)

    def end(self, batch_size: int, choice: Choice) -> None:
        """The step has been launched to its end."""
        end = self._moments.now()
        is_warm = self._last_choice == choice
        seen = _Seen(batch_size, choice, self._start, end, self._last_end, is_warm, self._counted, self._grown)
        self._period.steps.append(seen)
        self._last_end, self._last_choice = end, choice

    def pass_over(self, choice: Choice) -> None:
        """A step is not observed; the next one may be."""
        self._last_end, self._last_choice = None, choice

    def interrupt(self) -> None:
        """Something that is no decode step runs now; the time to the next one is no gap."""
        self._last_end = None

    def end_period(self) -> None:
        """Send what was observed to the host."""
        period, self._period = self._period, _Period()
        if not self._buffers:  # so far behind that this period is not looked at; its events are not used again
            self._last_end = None
            return
        period.counts = self._buffers.pop()
        rows = len(period.steps)
        if any(step.row is not None for step in period.steps):
            period.counts[:rows].copy_(self._counts[:rows], non_blocking=True)
        period.arrived = self._moments.now()
        self._on_their_way.append(period)

    def collect(self) -> list[Step]:
        """The steps of all periods that have arrived, in their order; waits for nothing."""
        steps: list[Step] = []
        while self._on_their_way and self._on_their_way[0].arrived.query():
            period = self._on_their_way.popleft()
            assert period.counts is not None
            steps += self._steps_of(period)
            self._buffers.append(period.counts)
            # The last end is the next period's first `before`.
            self._moments.give_back(period.arrived, *(step.start for step in period.steps))
            self._moments.give_back(*(step.end for step in period.steps[:-1]))
        return steps

    def _steps_of(self, period: _Period) -> list[Step]:
        assert period.counts is not None
        count = len(self._host_widths)
        requests = [min(seen.batch_size, _COUNTED) for seen in period.steps]
        rows = period.counts.numpy()  # whose calls take the host a fifth of PyTorch's
        steps = []
        for seen, counted in zip(period.steps, requests, strict=True):
            # Rows behind a batch are of earlier steps.
            told: list[float] = [] if seen.row is None else rows[seen.row, :counted].sum(axis=0).tolist()
            if not all(math.isfinite(value) for value in told):
                told = []  # a draft row without probabilities tells nothing
            is_chain = seen.choice.shape == "chain"
            verified = sum(width <= seen.choice.width for width in self._host_widths)
            grown = sum(width <= seen.grown for width in self._host_widths)
            steps.append(
                Step(
                    seen.batch_size,
                    seen.choice,
                    counted,
                    milliseconds=seen.start.elapsed_time(seen.end) if seen.is_warm else None,
                    gap=None if seen.before is None else seen.before.elapsed_time(seen.start),
                    accepted=told[-1:] if is_chain else told[:verified],
                    expected=() if is_chain else told[count : count + grown],
                    chain_accepted=told[-1] if told else 0.0,
                )
            )
        return steps
