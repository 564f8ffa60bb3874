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


#: Weight of what a plan's rounds took, once a choice has been measured for a while.
_WEIGHT = 0.3
#: Of the first so many rounds' measurements the least counts: whatever disturbs a step makes it longer.
_FEW = 16
#: What takes so many times as long as expected, or as short, is believed only after so many periods in a row.
_FAR, _AGREED = 1.25, 3
#: Rounds of others after which what a choice takes is still sure enough to tell what the bucket does.
_FRESH = 16
#: Relative doubt about a choice that was measured for a few rounds only: it may be so much better than it seems, and is
#: not believed to be so much slower than others suggest.
DOUBT = 0.05


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
    #: Rounds that were measured.
    rounds: int
    #: Rounds that had been measured in this bucket by then, of all choices.
    last: int
    #: What its last rounds took, over what was expected, if that was far from it; else 1.
    far: float = 1.0


class RoundTimes:
    """Expected milliseconds of a round.

    A round is its step (from before the draft to after the commit, always measurable) and the gap to the next one
    (the scheduler, the same for all choices; measurable only where nothing came between).

    Contexts grow and clocks change, which moves all choices: what the choice in use takes now, over what it took, is
    the bucket's level, and what other choices took moves with it.

    A stall of some steps (another process, a cold cache) makes a choice look slow that is not, and what looks slow is
    not looked at for long. So what is far from expected puts the bucket in doubt. If the next rounds are as expected it
    was a stall, or the choice's own: that is believed when it is seen again. If they are as far, the bucket has moved.

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
        self._rounds = dict.fromkeys(self.buckets, 0)
        #: Of the last periods in a row what they took over what was expected, all far from it, by bucket.
        self._doubts: dict[int, list[tuple[Choice, float]]] = {bucket: [] for bucket in self.buckets}

    def bucket(self, batch_size: int) -> int:
        """The bucket of a batch."""
        return self.buckets[min(bisect.bisect_left(self.buckets, batch_size), len(self.buckets) - 1)]

    def observe(self, bucket: int, choice: Choice, steps: Sequence[float], gaps: Sequence[float] = ()) -> None:
        """Take in what a few rounds of one choice took.

        Args:
            steps: Milliseconds of each step.
            gaps: Milliseconds between two steps with nothing else between them; negative ones count as none.
        """
        known, age = self.known(bucket, choice)
        self._rounds[bucket] += len(steps)
        lane = self._measured[bucket].get(choice)
        if steps and lane is not None and known >= _FEW:
            expected = lane.milliseconds * self._level[bucket] / lane.level
            ratio = statistics.median_low(steps) / expected
            if not 1.0 / _FAR < ratio < _FAR:
                lane.last += len(steps)  # it is looked at again as soon as if this look had not been
                self._doubt(bucket, choice, ratio, age)
                return
            self._doubts[bucket].clear()
            self._take(bucket, lane, expected * (1.0 + _WEIGHT * (ratio - 1.0)), is_same=not age)
        elif self._doubts[bucket]:  # nobody knows at which level this was measured
            return
        elif steps and lane is not None:
            expected = lane.milliseconds * self._level[bucket] / lane.level
            self._take(bucket, lane, min(expected, statistics.median_low(steps)), is_same=False)
        elif steps:
            now = statistics.median_low(steps)
            self._measured[bucket][choice] = _Measured(now, self._level[bucket], 0, self._rounds[bucket])
        if steps:
            self._measured[bucket][choice].rounds += len(steps)
        if gaps:
            gap = max(0.0, statistics.median(gaps))
            before = self._gap.get(bucket, gap)
            self._gap[bucket] = before + _WEIGHT * (gap - before)

    def _take(self, bucket: int, lane: _Measured, milliseconds: float, *, is_same: bool) -> None:
        """A choice takes so long now; where it is the same as before, what has changed is the bucket."""
        if is_same:
            self._level[bucket] *= milliseconds * lane.level / (lane.milliseconds * self._level[bucket])
        lane.milliseconds, lane.level = milliseconds, self._level[bucket]
        lane.last, lane.far = self._rounds[bucket], 1.0

    def _doubt(self, bucket: int, choice: Choice, ratio: float, age: int) -> None:
        """A choice took far more or less than expected: believe the least that was seen often enough, if any was."""
        lane, doubts = self._measured[bucket][choice], self._doubts[bucket]
        if doubts and (doubts[-1][1] > 1.0) != (ratio > 1.0):
            doubts.clear()
        is_again = not doubts and age > _FRESH and (lane.far > 1.0) == (ratio > 1.0) and lane.far != 1.0
        ratios = [lane.far, ratio] if is_again else [far for _, far in doubts] + [ratio]
        lane.far = ratio
        doubts.append((choice, ratio))
        if not is_again and len(doubts) < _AGREED:
            return
        least = min(ratios, key=lambda far: abs(far - 1.0))
        is_own = is_again or (age > _FRESH and all(other == choice for other, _ in doubts))
        doubts.clear()
        self._take(bucket, lane, lane.milliseconds * self._level[bucket] / lane.level * least, is_same=not is_own)

    def doubted(self, bucket: int) -> Choice | None:
        """The choice whose rounds just took far more or less than expected, while it is not known why."""
        return self._doubts[bucket][-1][0] if self._doubts[bucket] else None

    def known(self, bucket: int, choice: Choice) -> tuple[int, int]:
        """How many rounds of a choice were measured in a bucket, and how many of others since, or at all."""
        lane = self._measured[bucket].get(choice)
        return (0, self._rounds[bucket]) if lane is None else (lane.rounds, self._rounds[bucket] - lane.last)

    def is_sure(self, bucket: int, choice: Choice) -> bool:
        """Whether a choice was measured for more than a few rounds."""
        return self.known(bucket, choice)[0] >= _FEW

    def expected(self, bucket: int, choice: Choice) -> float:
        """Milliseconds that a round is expected to take: step and gap."""
        return self.step(bucket, choice) + self.gap(bucket)

    def gap(self, bucket: int) -> float:
        """Milliseconds between two steps; of the nearest bucket where it is known."""
        if not self._gap:
            return 0.0
        return self._gap[min(self._gap, key=lambda known: abs(known - bucket))]

    def least(self, bucket: int, choice: Choice) -> float:
        """Milliseconds that a round takes at least, of a choice that was not measured.

        A host that is slower than the device hides what a wider graph takes more, and one that hides nothing gains
        all that a narrower one takes less.
        """
        others = self._others(bucket, choice)
        step = self._guess(bucket, choice, others, hidden=True) if others else self._base(bucket, choice)
        return step + self.gap(bucket)

    def step(self, bucket: int, choice: Choice) -> float:
        """Milliseconds that a step is expected to take.

        A choice that was not measured is expected to differ from the nearest measured one as at start-up.
        """
        lane, others = self._measured[bucket].get(choice), self._others(bucket, choice)
        guess = self._guess(bucket, choice, others) if others else self._base(bucket, choice)
        if lane is None:
            return guess
        time = lane.milliseconds * self._level[bucket] / lane.level
        is_doubtful = lane.rounds < _FEW <= max((self.known(bucket, other)[0] for other in others), default=0)
        return min(time, (1.0 + DOUBT) * guess) if is_doubtful else time

    def _others(self, bucket: int, choice: Choice) -> dict[Choice, float]:
        """Milliseconds of what tells of a choice, as they would be now: others that draft if it does, else any.

        Those that are well known, if there are any: the first rounds may have been disturbed.
        """
        level, lanes = self._level[bucket], self._measured[bucket]
        others = [known for known in lanes if known != choice]
        alike = [known for known in others if (known.shape == "none") == (choice.shape == "none")] or others
        sure = [known for known in alike if lanes[known].rounds >= _FEW] or alike
        return {known: lanes[known].milliseconds * level / lanes[known].level for known in sure}

    def _guess(self, bucket: int, choice: Choice, times: Mapping[Choice, float], *, hidden: bool = False) -> float:
        """What a choice would take, from what others take; with `hidden` the least of it."""
        nearest = min(times, key=lambda known: (abs(known.width - choice.width), known))
        base, reference, took = self._base(bucket, choice), self._base(bucket, nearest), times[nearest]
        if not self._prior:
            ratio = choice.width / nearest.width
            guess = took * (ratio if ratio <= 1.0 else ratio**0.25)
        elif base < reference:
            ratio = took * base / reference
            guess = ratio if hidden else max(ratio, took + base - reference)
        else:
            guess = max(took, base) if hidden else took + base - reference
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
