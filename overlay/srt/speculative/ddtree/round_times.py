# SPDX-License-Identifier: Apache-2.0
"""How long a decode round takes, for every choice and batch bucket: a start-up measurement, then what rounds took.

The cost of a width is a staircase (tiles of the kernels, graphs that were captured), so no curve is fitted to it.
"""

from __future__ import annotations

import bisect
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang.srt.speculative.ddtree.start_up_bounds import StartUp


#: Weight of what a look at a choice shows, once it has been compared for a while.
_WEIGHT = 0.3
#: Rounds of a choice that are compared with another's until what it takes is known.
_FEW = 16
#: Two measurements of the same that differ by more than this were made at different levels. So much more, or less, than
#: start-up allows a choice may take before it is wondered at.
_APART = 1.1
#: Without start-up, what is so many times as much as before is wondered at, or as little.
_FAR = 1.25
#: Rounds of the choice in use that the level is a quartile of: what disturbs a step makes it longer.
_LEVELS = 48
#: So few first rounds may have been disturbed: a compiler, caches, the end of a prefill. They may have taken so many
#: times too long.
_FIRST, _TOO_LONG = 6, 1.15
#: Looks that can wait for what runs after them.
_LOOKS = 8
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
class _Lane:
    """What a choice takes in a bucket."""

    #: While the bucket's level is 1.
    milliseconds: float
    #: Rounds that were measured, and those of them that were compared with another choice's.
    rounds: int
    compared: int
    #: Rounds that there had been in this bucket by then, of all choices.
    last: int
    #: What its last look showed, if start-up says that it cannot be so.
    strange: float | None = None
    #: Whether that was seen again, and so is believed.
    is_odd: bool = False


class _Look(NamedTuple):
    """Rounds of one choice that came between those of another."""

    choice: Choice
    milliseconds: float
    rounds: int


@dataclass
class _Bucket:
    #: The choice in use, what its last rounds took, and whether those before them took the same.
    used: Choice
    took: float
    is_settled: bool = True
    lanes: dict[Choice, _Lane] = field(default_factory=dict)
    #: What rounds of the choice in use took lately, over what is kept of it, and the level that this makes.
    levels: deque[float] = field(default_factory=lambda: deque(maxlen=_LEVELS))
    level: float = 1.0
    #: What ran since its last rounds.
    looks: deque[_Look] = field(default_factory=lambda: deque(maxlen=_LOOKS))
    #: Rounds so far, of all choices.
    rounds: int = 0

    def use(self, seen: _Look) -> None:
        """The choice in use took so long."""
        self.used, self.took = seen.choice, seen.milliseconds
        lane = self.lanes[seen.choice]
        lane.rounds, lane.last = lane.rounds + seen.rounds, self.rounds
        self.levels.extend([seen.milliseconds / lane.milliseconds] * seen.rounds)
        self.level = sorted(self.levels)[len(self.levels) // 4]

    def now(self, choice: Choice) -> float:
        """Milliseconds that a choice takes now, as far as looks told."""
        return self.lanes[choice].milliseconds * self.level


class RoundTimes:
    """Expected milliseconds of a round.

    A round is its step (from before the draft to after the commit, always measurable) and the gap to the next one
    (the scheduler, the same for all choices; measurable only where nothing came between).

    What a step takes is what its choice takes, times the bucket's level, which is the same for all: contexts grow,
    clocks change, and a host that does something else is slow for seconds. The level is what the choice in use takes
    now, over what it took. What another takes is only ever compared with the choice in use, as that was right before
    and right after: where those two differ, nobody knows at which level the look was made, and it has to be repeated.

    So has a look that shows what start-up says cannot be: that a choice takes more than a wider one, or more than a
    narrower one by more than its graph takes more, since what the host does is the same for all. Else a stall that hits
    a look alone would keep a choice away for thousands of steps, or in use for as long.

    Args:
        buckets: Batch sizes, ascending; a batch belongs to the smallest that holds it, a larger one to the last.
        prior: Milliseconds that a step was measured to take at start-up at least, by bucket and choice; may lack some.
    """

    def __init__(self, buckets: Sequence[int], prior: Mapping[tuple[int, Choice], float] | None = None) -> None:
        self.buckets = tuple(buckets)
        self._start_up = StartUp(prior or {})
        self._here: dict[int, _Bucket] = {}
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
        steps = [step for step in steps if step > 0.0]
        if steps:
            self._take_in(bucket, _Look(choice, statistics.median_low(steps), len(steps)))
        if gaps:
            gap = max(0.0, statistics.median(gaps))
            before = self._gap.get(bucket, gap)
            self._gap[bucket] = before + _WEIGHT * (gap - before)

    def pass_over(self, bucket: int) -> None:
        """A round was not measured: what is known of a bucket is older by it."""
        if bucket in self._here:
            self._here[bucket].rounds += 1

    def _take_in(self, bucket: int, seen: _Look) -> None:
        """Rounds of the choice in use tell the level, and settle what the looks since its last ones were worth."""
        choice, took, rounds = seen
        here = self._here.get(bucket)
        if here is None:  # all others are compared with it
            here = self._here[bucket] = _Bucket(choice, took, lanes={choice: _Lane(took, 0, _FEW, 0)})
        here.rounds += rounds
        if choice == here.used:
            here.is_settled = _are_alike(here.took, took)
            self._judge(
                bucket, here, (here.took + took) / 2 if here.is_settled else min(here.took, took), is_after=True
            )
        elif here.looks and here.looks[-1].choice == choice:  # twice in a row: it is in use now
            here.is_settled = _are_alike(here.looks[-1].milliseconds, took)
            if not here.is_settled:
                here.looks[-1] = seen
            self._judge(bucket, here, here.took, is_after=False)
        else:
            here.looks.append(seen)
            return
        here.use(seen)

    def _judge(self, bucket: int, here: _Bucket, beside: float, *, is_after: bool) -> None:
        """Learn from looks beside which the choice in use took so long; if that is not sure, of new choices only.

        Args:
            is_after: Whether it ran after them as well, not only before, which may have been long ago.
        """
        for look in here.looks:
            if here.is_settled or look.choice not in here.lanes:
                self._learn(bucket, here, look, beside, is_after=is_after)
        here.looks.clear()

    def _learn(self, bucket: int, here: _Bucket, look: _Look, beside: float, *, is_after: bool) -> None:
        used, lane = here.lanes[here.used], here.lanes.get(look.choice)
        level = beside / used.milliseconds
        found = look.milliseconds / level
        least, most = self._bounds(bucket, here, look.choice, beside)
        least, most = least / level, most / level
        # What cannot be, beside something that may have run in a stall, is no comparison, but has to be put somewhere.
        is_guess = lane is None and not is_after and not least <= found <= most
        if lane is None:
            found = max(least, min(found, most))
            lane = here.lanes[look.choice] = _Lane(found, 0, 0, 0)
        before, lane.strange = lane.strange, None
        is_near = _are_alike(found, lane.milliseconds)
        if not is_near and not least <= found <= most:
            if before is None or (before > lane.milliseconds) != (found > lane.milliseconds):
                lane.strange = found
                return
            lane.milliseconds, lane.is_odd = min(before, found, key=lambda ms: abs(ms - lane.milliseconds)), True
        elif not is_near and not least <= lane.milliseconds <= most:
            lane.milliseconds, lane.is_odd = found, False
        elif used.compared < _FEW <= lane.compared:  # the one that is known less well learns
            used.milliseconds *= 1.0 + _weight(used, look) * (lane.milliseconds / found - 1.0)
            used.compared += look.rounds
        else:
            lane.milliseconds += _weight(lane, look) * (found - lane.milliseconds)
            lane.is_odd = not least <= found <= most
        lane.compared += 0 if is_guess else look.rounds
        lane.rounds, lane.last = lane.rounds + look.rounds, here.rounds

    def _bounds(self, bucket: int, here: _Bucket, choice: Choice, beside: float) -> tuple[float, float]:
        """Between what a choice takes, where the one in use takes so long."""
        start_up = self._start_up
        least = start_up.least(bucket, choice, {here.used: beside}) / _APART
        most = start_up.most(bucket, choice, here.used, beside) * _APART
        if not start_up and choice in here.lanes:  # then what was seen before has to do
            known = here.lanes[choice].milliseconds * beside / here.lanes[here.used].milliseconds
            return known / _FAR, min(most, known * _FAR)
        return (0.0 if choice.shape == "none" or not start_up else least), most

    def is_settled(self, bucket: int) -> bool:
        """Whether the last rounds of the choice in use took what those before them did, or are among the first."""
        here = self._here.get(bucket)
        return here is None or here.is_settled or len(here.levels) < _FIRST

    def is_pending(self, bucket: int, choice: Choice) -> bool:
        """Whether a choice was looked at and it is not known yet at which level."""
        here = self._here.get(bucket)
        return here is not None and any(look.choice == choice for look in here.looks)

    def known(self, bucket: int, choice: Choice) -> tuple[int, int]:
        """How many rounds of a choice were measured in a bucket, and how many of others since, or at all."""
        here = self._here.get(bucket)
        if here is None:
            return 0, 0
        lane = here.lanes.get(choice)
        return (0, here.rounds) if lane is None else (lane.rounds, here.rounds - lane.last)

    def expected(self, bucket: int, choice: Choice) -> float:
        """Milliseconds that a round is expected to take: step and gap."""
        return self.step(bucket, choice) + self.gap(bucket)

    def gap(self, bucket: int) -> float:
        """Milliseconds between two steps; of the nearest bucket where it is known."""
        if not self._gap:
            return 0.0
        return self._gap[min(self._gap, key=lambda known: abs(known - bucket))]

    def least(self, bucket: int, choice: Choice) -> float:
        """Milliseconds that a round takes at least, as far as is known."""
        return self._least(bucket, choice) + self.gap(bucket)

    def _least(self, bucket: int, choice: Choice) -> float:
        here, start_up = self._here.get(bucket), self._start_up
        if here is None:
            return start_up.base(bucket, choice)
        used = {here.used: here.now(here.used)}
        if choice not in here.lanes:
            # Of the tree as wide as the chain only the graph is the same: the one in use tells as much.
            is_chain = choice.shape == "chain" and here.used.shape == "tree"
            return start_up.least(bucket, choice, used if is_chain else _others(here, choice))
        step = self.step(bucket, choice)
        # Beside one in use that was compared with nothing, all others may be far better than they seem.
        is_doubtful = here.lanes[choice].rounds < _FIRST and here.lanes[here.used].rounds >= _FEW
        is_doubtful = is_doubtful or not here.lanes[here.used].compared
        if not is_doubtful or not start_up or choice == here.used:
            return step
        if choice.shape == "none":  # what it saves the host, start-up does not know
            return step / _TOO_LONG
        return min(step, (1.0 + DOUBT) * start_up.guess(bucket, choice, used))

    def step(self, bucket: int, choice: Choice) -> float:
        """Milliseconds that a step is expected to take.

        A choice that was not measured is expected to differ from the nearest measured one as at start-up.
        """
        here, start_up = self._here.get(bucket), self._start_up
        if here is None or here.lanes.keys() == {choice}:
            return start_up.base(bucket, choice) if here is None else here.now(choice)
        others = _others(here, choice)
        guess = (1.0 + DOUBT) * start_up.guess(bucket, choice, others)
        if choice not in here.lanes:
            pending = [look.milliseconds for look in here.looks if look.choice == choice]
            if not pending or not start_up:
                return min(pending, default=guess / (1.0 + DOUBT))
            return max(start_up.least(bucket, choice, others), min(*pending, guess))
        lane, used, time = here.lanes[choice], here.lanes[here.used], here.now(choice)
        if choice != here.used and not used.is_odd and not lane.is_odd:
            time = min(time, start_up.most(bucket, choice, here.used, here.now(here.used)))
        # What the one in use takes is seen, whatever it was compared with.
        is_seen = choice == here.used and lane.rounds >= _FEW
        is_doubtful = not is_seen and lane.compared < _FEW <= max(here.lanes[other].compared for other in others)
        return min(time, guess) if is_doubtful and start_up else time


def _others(here: _Bucket, choice: Choice) -> dict[Choice, float]:
    """Milliseconds of what tells of a choice, as they would be now: others that draft if it does, else any.

    Those that are well known, if there are any: the first rounds may have been disturbed.
    """
    others = [known for known in here.lanes if known != choice]
    alike = [known for known in others if (known.shape == "none") == (choice.shape == "none")] or others
    sure = [known for known in alike if here.lanes[known].compared >= _FEW] or alike
    return {known: here.now(known) for known in sure}


def _weight(lane: _Lane, look: _Look) -> float:
    return max(_WEIGHT, look.rounds / (lane.compared + look.rounds))


def _are_alike(one: float, other: float) -> bool:
    return 1.0 / _APART <= one / other <= _APART
