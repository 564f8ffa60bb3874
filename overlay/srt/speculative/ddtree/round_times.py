# SPDX-License-Identifier: Apache-2.0
"""How long a decode round takes, for every choice and batch bucket: a start-up measurement, then what rounds took.

The cost of a width is a staircase (tiles of the kernels, graphs that were captured), so no curve is fitted to it.
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sglang.srt.speculative.ddtree.bucket_times import BucketTimes, ChoiceTime, Look
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
#: So few first rounds may have been disturbed: a compiler, caches, the end of a prefill. They may have taken so many
#: times too long.
_FIRST, _TOO_LONG = 6, 1.15
#: What rounds take, times this, is no less than what their graphs took at start-up unless that was disturbed; for so
#: many rounds running a clock that scatters does not say otherwise. On an H200 it was 1.02 at least without a factor.
_QUICKER, _QUICK_ROUNDS = 1.25, 18
#: A gap as long as so many steps belongs to no round.
_IDLE = 10
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


class RoundTimes:
    """Expected milliseconds of a round.

    A round is its step (from before the draft to after the commit, always measurable) and the gap before it (the
    scheduler; measurable only where nothing came between). A device that waits for the host waits less behind a step
    that took longer, so that neither says by itself what a choice costs.

    What a round takes is what its choice takes, times the bucket's level, which is the same for all: contexts grow,
    clocks change, and a host that does something else is slow for seconds. The level is what the choice in use takes
    now, over what it took. What another takes is only ever compared with the choice in use, as that was right before
    and right after: where those two differ, nobody knows at which level the look was made, and it has to be repeated.

    So has a look that shows what start-up says cannot be: that a choice takes more than a wider one, or more than a
    narrower one by more than its graph takes more, since what the host does is the same for all. Else a stall that hits
    a look alone would keep a choice away for thousands of steps, or in use for as long. Rounds that take much less than
    start-up says that their graphs do show that something else had the device then: that bucket goes on without it.

    Args:
        buckets: Batch sizes, ascending; a batch belongs to the smallest that holds it, a larger one to the last.
        prior: Milliseconds that a step was measured to take at start-up at least, by bucket and choice; may lack some.
    """

    def __init__(self, buckets: Sequence[int], prior: Mapping[tuple[int, Choice], float] | None = None) -> None:
        self.buckets = tuple(buckets)
        self._start_up = StartUp(prior or {})
        self._here: dict[int, BucketTimes] = {}
        self._gap: dict[int, float] = {}

    def bucket(self, batch_size: int) -> int:
        """The bucket of a batch."""
        return self.buckets[min(bisect.bisect_left(self.buckets, batch_size), len(self.buckets) - 1)]

    def observe(self, bucket: int, choice: Choice, seen: Sequence[tuple[float | None, float | None]]) -> None:
        """Take in what a few rounds of one choice took.

        A gap that is not known is taken to be as long as the others of these rounds, or of the nearest bucket where one
        is. One of many steps' length is none: a server that was paused, or a host that did something else.

        Args:
            seen: Milliseconds of each step, None if they are not to be believed, and of the gap before it, None if
                something came between; a negative one counts as 0.
        """
        steps = [(step, gap) for step, gap in seen if step is not None and step > 0.0]
        longest = _IDLE * statistics.median_low([step for step, _ in steps]) if steps else 0.0
        steps = [(step, None if gap is None or gap > longest else max(0.0, gap)) for step, gap in steps]
        gaps = [gap for _, gap in steps if gap is not None]
        usual = statistics.median_low(gaps) if gaps else self.gap(bucket)
        if gaps:
            before = self._gap.get(bucket, usual)
            self._gap[bucket] = before + _WEIGHT * (usual - before)
        rounds = [step + (usual if gap is None else gap) for step, gap in steps]
        if rounds:
            self._take_in(bucket, Look(choice, statistics.median_low(rounds), len(rounds)))

    def pass_over(self, bucket: int) -> None:
        """A round was not measured: what is known of its bucket is older by it."""
        if bucket in self._here:
            self._here[bucket].rounds += 1

    def _take_in(self, bucket: int, seen: Look) -> None:
        """Rounds of the choice in use tell the level, and settle what the looks since its last ones were worth."""
        choice, took, rounds = seen
        here = self._here.get(bucket)
        if here is None:  # all others are compared with it
            here = self._here[bucket] = BucketTimes(
                choice, took, self._start_up, times={choice: ChoiceTime(took, 0, _FEW, 0)}
            )
        here.rounds += rounds
        if here.start_up:
            here.quicker = here.quicker + rounds if took * _QUICKER < here.start_up.known(bucket, choice) else 0
            if here.quicker >= _QUICK_ROUNDS:
                here.disbelieve()
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

    def _judge(self, bucket: int, here: BucketTimes, beside: float, *, is_after: bool) -> None:
        """Learn from looks beside which the choice in use took so long; if that is not sure, of new choices only.

        Args:
            is_after: Whether it ran after them as well, not only before, which may have been long ago.
        """
        for look in here.looks:
            if here.is_settled or look.choice not in here.times:
                self._learn(bucket, here, look, beside, is_after=is_after)
        here.looks.clear()

    def _learn(self, bucket: int, here: BucketTimes, look: Look, beside: float, *, is_after: bool) -> None:
        used, timed = here.times[here.used], here.times.get(look.choice)
        if here.former and here.former[0] == look.choice:
            here.former = None
        level = beside / used.milliseconds
        found = look.milliseconds / level
        least, most = self._bounds(bucket, here, look.choice, beside)
        least, most = least / level, most / level
        # What cannot be, beside something that may have run in a stall, is no comparison, but has to be put somewhere.
        is_guess = timed is None and not is_after and not least <= found <= most
        if timed is None:
            found = max(least, min(found, most))
            timed = here.times[look.choice] = ChoiceTime(found, 0, 0, 0)
        before, timed.strange = timed.strange, None
        is_near = _are_alike(found, timed.milliseconds)
        if not is_near and not least <= found <= most:
            if before is None or (before > timed.milliseconds) != (found > timed.milliseconds):
                timed.strange = found
                return
            timed.milliseconds, timed.is_odd = min(before, found, key=lambda ms: abs(ms - timed.milliseconds)), True
        elif not is_near and not least <= timed.milliseconds <= most:
            timed.milliseconds, timed.is_odd = found, False
        elif used.compared < _FEW <= timed.compared:  # the one that is known less well learns
            used.milliseconds *= 1.0 + _weight(used, look) * (timed.milliseconds / found - 1.0)
            used.compared += look.rounds
        else:
            timed.milliseconds += _weight(timed, look) * (found - timed.milliseconds)
            timed.is_odd = not least <= found <= most
        timed.compared += 0 if is_guess else look.rounds
        timed.rounds, timed.last = timed.rounds + look.rounds, here.rounds

    def _bounds(self, bucket: int, here: BucketTimes, choice: Choice, beside: float) -> tuple[float, float]:
        """Between what a choice takes, where the one in use takes so long."""
        start_up = here.start_up
        least = start_up.least(bucket, choice, {here.used: beside}) / _APART
        most = start_up.most(bucket, choice, here.used, beside) * _APART
        if not start_up and choice in here.times:  # then what was seen before has to do
            known = here.times[choice].milliseconds * beside / here.times[here.used].milliseconds
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
        timed = here.times.get(choice)
        return (0, here.rounds) if timed is None else (timed.rounds, here.rounds - timed.last)

    def rounds(self, bucket: int) -> int:
        """How many rounds there were in a bucket."""
        here = self._here.get(bucket)
        return 0 if here is None else here.rounds

    def gap(self, bucket: int) -> float:
        """Milliseconds between two steps; of the nearest bucket where it is known."""
        if not self._gap:
            return 0.0
        return self._gap[min(self._gap, key=lambda known: abs(known - bucket))]

    def least(self, bucket: int, choice: Choice) -> float:
        """Milliseconds that a round takes at least, as far as is known."""
        here = self._here.get(bucket)
        if here is None:
            return self.expected(bucket, choice)
        start_up = here.start_up
        used = {here.used: here.now(here.used)}
        if choice not in here.times:
            # Of the tree as wide as the chain only the graph is the same: the one in use tells as much.
            is_chain = choice.shape == "chain" and here.used.shape == "tree"
            return start_up.least(bucket, choice, used if is_chain else _others(here, choice))
        took = self.expected(bucket, choice)
        if here.former and here.former[0] == choice and here.times[here.used].compared < _FEW:
            took = min(took, here.former[1])
        # Beside one in use that was compared with nothing, all others may be far better than they seem.
        is_doubtful = here.times[choice].rounds < _FIRST and here.times[here.used].rounds >= _FEW
        is_doubtful = is_doubtful or not here.times[here.used].compared
        if not is_doubtful or not start_up or choice == here.used:
            return took
        if choice.shape == "none":  # what it saves the host, start-up does not know
            return took / _TOO_LONG
        return min(took, (1.0 + DOUBT) * start_up.guess(bucket, choice, used))

    def expected(self, bucket: int, choice: Choice) -> float:
        """Milliseconds that a round is expected to take: step and gap.

        A choice that was not measured is expected to differ from the nearest measured one as at start-up.
        """
        here = self._here.get(bucket)
        if here is None:
            return self._start_up.base(bucket, choice) + self.gap(bucket)
        if here.times.keys() == {choice}:
            return here.now(choice)
        start_up = here.start_up
        others = _others(here, choice)
        guess = (1.0 + DOUBT) * start_up.guess(bucket, choice, others)
        if choice not in here.times:
            pending = [look.milliseconds for look in here.looks if look.choice == choice]
            if not pending or not start_up:
                return min(pending, default=guess / (1.0 + DOUBT))
            return max(start_up.least(bucket, choice, others), min(*pending, guess))
        timed, used, time = here.times[choice], here.times[here.used], here.now(choice)
        if choice != here.used and not used.is_odd and not timed.is_odd:
            time = min(time, start_up.most(bucket, choice, here.used, here.now(here.used)))
        # What the one in use takes is seen, whatever it was compared with.
        is_seen = choice == here.used and timed.rounds >= _FEW
        is_doubtful = not is_seen and timed.compared < _FEW <= max(here.times[other].compared for other in others)
        return min(time, guess) if is_doubtful and start_up else time


def _others(here: BucketTimes, choice: Choice) -> dict[Choice, float]:
    """Milliseconds of what tells of a choice, as they would be now: others that draft if it does, else any.

    Those that are well known, if there are any: the first rounds may have been disturbed.
    """
    others = [known for known in here.times if known != choice]
    alike = [known for known in others if (known.shape == "none") == (choice.shape == "none")] or others
    sure = [known for known in alike if here.times[known].compared >= _FEW] or alike
    return {known: here.now(known) for known in sure}


def _weight(timed: ChoiceTime, look: Look) -> float:
    return max(_WEIGHT, look.rounds / (timed.compared + look.rounds))


def _are_alike(one: float, other: float) -> bool:
    return 1.0 / _APART <= one / other <= _APART
