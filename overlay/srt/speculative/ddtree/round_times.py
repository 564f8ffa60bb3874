# SPDX-License-Identifier: Apache-2.0
"""How long a decode round takes, for every choice and batch bucket: a start-up measurement, then what rounds took.

The cost of a width is a staircase (tiles of the kernels, graphs that were captured), so no curve is fitted to it.
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


#: A single round is believed to take between half and twice what was expected.
_CLAMP = 2.0
#: Weight of what a plan's rounds took: once a choice has been measured for a while, and when others ran in between.
_WEIGHT, _AGAIN = 0.2, 0.4
#: Of the first so many measurements the least counts: whatever disturbs a step makes it longer.
_FEW = 3
#: Until then a choice is not believed to be slower than others suggest by more than this.
_DOUBT = 1.05


class Choice(NamedTuple):
    """What a batch is verified with: tokens per request, and what they are."""

    #: Tokens that the target verifies per request, the root included.
    width: int
    #: "tree", "chain" (DFLASH's draft) or "none" (the root alone; nothing is drafted).
    shape: str = "tree"

    def __str__(self) -> str:
        """A name for logs and metrics: the budget of a tree, or the shape."""
        return str(self.width - 1) if self.shape == "tree" else self.shape


@dataclass
class _Measured:
    """What rounds of one choice took in one bucket."""

    milliseconds: float
    #: The bucket's level when that was measured.
    level: float
    samples: int = 1
    #: Milliseconds of rounds of other choices in this bucket since.
    age: float = 0.0


class RoundTimes:
    """Expected milliseconds of a round.

    A round is its step (from before the draft to after the commit, always measurable) and the gap to the next one
    (the scheduler, the same for all choices; measurable only where nothing came between).

    Contexts grow and clocks change, which moves all choices: what the choice in use takes now, over what it took, is
    the bucket's level, and what other choices took moves with it.

    Args:
        buckets: Batch sizes, ascending; a batch belongs to the smallest that holds it, a larger one to the last.
        prior: Milliseconds that a step was measured to take at start-up at least, by bucket and choice; may lack some.
    """

    def __init__(self, buckets: Sequence[int], prior: Mapping[tuple[int, Choice], float] | None = None) -> None:
        self.buckets = tuple(buckets)
        self._prior = dict(prior or {})
        self._measured: dict[int, dict[Choice, _Measured]] = {bucket: {} for bucket in self.buckets}
        self._level = dict.fromkeys(self.buckets, 1.0)
        self._gap: dict[int, float] = {}

    def bucket(self, batch_size: int) -> int:
        """The bucket of a batch."""
        return self.buckets[min(bisect.bisect_left(self.buckets, batch_size), len(self.buckets) - 1)]

    def observe(self, bucket: int, choice: Choice, steps: Sequence[float], gaps: Sequence[float] = ()) -> None:
        """Take in what a few rounds of one choice took.

        Args:
            steps: Milliseconds of each step.
            gaps: Milliseconds between two steps with nothing else between them; negative ones count as none.
        """
        if gaps:
            gap = max(0.0, statistics.median(gaps))
            self._gap[bucket] = (
                gap if bucket not in self._gap else self._gap[bucket] + _WEIGHT * (gap - self._gap[bucket])
            )
        if not steps:
            return
        lanes = self._measured[bucket]
        for other, lane in lanes.items():
            lane.age += 0.0 if other == choice else sum(steps)
        sample, lane = statistics.median(steps), lanes.get(choice)
        if lane is None:
            lanes[choice] = _Measured(sample, self._level[bucket])
            return
        before = lane.milliseconds * self._level[bucket] / lane.level
        if lane.samples < _FEW:
            now = min(before, sample)
        else:
            weight = _AGAIN if lane.age > 0.0 else _WEIGHT
            now = before + weight * (min(max(sample, before / _CLAMP), before * _CLAMP) - before)
        if lane.samples >= _FEW and lane.age == 0.0:  # the same choice as before: what has changed is the bucket
            self._level[bucket] *= now / before
        lane.milliseconds, lane.level = now, self._level[bucket]
        lane.samples, lane.age = lane.samples + 1, 0.0

    def age(self, bucket: int, choice: Choice) -> float | None:
        """Milliseconds of rounds since a choice was measured in a bucket; None if it never was."""
        lane = self._measured[bucket].get(choice)
        return None if lane is None else lane.age

    def is_doubtful(self, bucket: int, choice: Choice) -> bool:
        """Whether a choice was measured in a bucket only a few times, if at all."""
        lane = self._measured[bucket].get(choice)
        return lane is None or lane.samples < _FEW

    def expected(self, bucket: int, choice: Choice) -> float:
        """Milliseconds that a round is expected to take: step and gap."""
        return self.step(bucket, choice) + self.gap(bucket)

    def gap(self, bucket: int) -> float:
        """Milliseconds between two steps; of the nearest bucket where it is known."""
        if not self._gap:
            return 0.0
        return self._gap[min(self._gap, key=lambda known: abs(known - bucket))]

    def step(self, bucket: int, choice: Choice) -> float:
        """Milliseconds that a step is expected to take.

        A choice that was not measured is expected to differ from the nearest measured one as at start-up, by ratio or
        by difference, whichever promises more: if that was too good, the first rounds say so, while a choice that was
        thought too poor would never be tried.
        """
        lanes, level = self._measured[bucket], self._level[bucket]
        times = {known: lane.milliseconds * level / lane.level for known, lane in lanes.items()}
        if choice not in lanes:
            return self._guess(bucket, choice, times)
        if lanes[choice].samples < _FEW:
            times = {known: time for known, time in times.items() if lanes[known].samples >= _FEW}
            if times:
                measured = lanes[choice].milliseconds * level / lanes[choice].level
                return min(measured, _DOUBT * self._guess(bucket, choice, times))
        return lanes[choice].milliseconds * level / lanes[choice].level

    def _guess(self, bucket: int, choice: Choice, times: Mapping[Choice, float]) -> float:
        """What a choice would take, from what others take."""
        base = self._base(bucket, choice)
        if not times:
            return base
        nearest = min(times, key=lambda known: (abs(known.width - choice.width), known))
        took = times[nearest]
        if self._prior:
            reference = self._base(bucket, nearest)
            guess = max(min(base * took / reference, base + took - reference), 0.05 * took)
        else:
            ratio = choice.width / nearest.width
            guess = took * (ratio if ratio <= 1.0 else ratio**0.5)
        # No width is cheaper than a narrower one, whatever start-up said.
        floor = max((time for known, time in times.items() if known.width <= choice.width), default=0.0)
        ceiling = min((time for known, time in times.items() if known.width >= choice.width), default=guess)
        return max(floor, min(guess, ceiling)) if choice.shape == "tree" else min(guess, ceiling)

    def _base(self, bucket: int, choice: Choice) -> float:
        """The start-up measurement, or the nearest one: of the next wider choice, else of the next bucket; else 1."""
        found = self._prior.get((bucket, choice))
        if found is not None:
            return found
        same = [
            (abs(other.width - choice.width), time)
            for (where, other), time in self._prior.items()
            if where == bucket and other.width >= choice.width
        ]
        if same:
            return min(same)[1]
        elsewhere = [
            (abs(where - bucket), time) for (where, other), time in self._prior.items() if other.width == choice.width
        ]
        return min(elsewhere)[1] if elsewhere else 1.0
