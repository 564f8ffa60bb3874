# SPDX-License-Identifier: Apache-2.0
"""Which width and shape a batch is verified with: the one that promises most tokens per millisecond.

Plain Python without tensors. A plan names a choice for every batch bucket and holds for a number of steps that it names
as well, so that tensor-parallel ranks that share a plan switch at the same step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from sglang.srt.speculative.ddtree.accept_rates import AcceptRates
from sglang.srt.speculative.ddtree.round_times import DOUBT, Choice, RoundTimes


#: Decode steps that a plan holds for, and that are observed of a longer one, its last. The first plans hold for fewer,
#: from this many on.
PERIOD, _FIRST_PERIOD = 8, 2
#: A plan that changes nothing holds for twice as many steps as the last such one, up to so many and so many
#: milliseconds: observing and planning take the host a tenth of a millisecond a step, in which it launches nothing.
#: Buckets that were not decoded for so many rounds have no such plans: there is more to find out.
_LONGEST, _LASTS, SEASONED = 128, 320.0, 64
#: A look at what promises less than this part of what is in use lasts no longer than this many steps.
_COSTLY, _SHORT_LOOK = 0.85, 2
#: A choice replaces the one in use, or is looked at, if it promises so much more.
_ADVANTAGE = 1.012
#: Relative doubt about a choice that a round of others adds.
_AGING = 1 / 8000


@dataclass(frozen=True)
class Step:
    """What one decode step showed."""

    batch_size: int
    choice: Choice
    #: Requests that the sums are over: those of the batch, or the first of a large one.
    requests: int = 0
    #: Milliseconds from before the draft to after the commit; None if they are not to be believed.
    milliseconds: float | None = None
    #: Milliseconds since the step before, if nothing came between.
    gap: float | None = None
    #: Draft tokens that each tree width would have accepted, up to the verified one; of a chain step, the one sum.
    accepted: Sequence[float] = ()
    #: Sum of the probabilities of each tree width's nodes, as far as trees were grown.
    expected: Sequence[float] = ()
    #: Draft tokens that the chain would have accepted, as far as a tree's step tells.
    chain_accepted: float = 0.0


class Chooser:
    """Plans a choice per batch bucket from measured round times and running acceptance.

    Args:
        choices: What can be chosen; the trees' widths are what acceptance is counted for.
        buckets: Batch sizes, ascending (`RoundTimes`).
        chain_width: Width of the chain, the draft block.
        prior: Milliseconds of a step at start-up by bucket and choice.
        fits: Whether a choice is served from a graph at a batch size. Where none is, all are taken.

    Raises:
        RuntimeError: There is nothing to choose from.
    """

    def __init__(
        self,
        choices: Sequence[Choice],
        buckets: Sequence[int],
        *,
        chain_width: int,
        prior: Mapping[tuple[int, Choice], float] | None = None,
        fits: Callable[[int, int], bool] | None = None,
    ) -> None:
        if not choices or not buckets:
            raise RuntimeError(f"DDTREE chooses among choices by bucket, got choices {choices} and buckets {buckets}")
        self.choices = tuple(choices)
        self.rates = AcceptRates(sorted({c.width for c in choices if c.shape == "tree"}), chain_width)
        self.times = RoundTimes(buckets, prior)
        self._allowed = {
            bucket: [c for c in self.choices if fits is None or fits(c.width, bucket)] or list(self.choices)
            for bucket in self.times.buckets
        }
        #: What is used when nothing is being looked at, by bucket.
        self._best = {bucket: self._start(bucket) for bucket in self.times.buckets}
        self.plan = dict(self._best)
        #: Steps that a plan for long goes on for at most once the batch changes to a bucket: few where nobody knows it,
        #: and where steps take long fewer than the plan was made for.
        self.lasts = dict.fromkeys(self.times.buckets, PERIOD)
        #: Steps that the plan holds for, those of plans without a costly look, and those of the last one that changed
        #: nothing.
        self.period = self._usual_period = _FIRST_PERIOD
        self._quiet_period = PERIOD
        self._active: set[int] = set()
        self._turn = 0
        self._is_planned = False

    def choose(self, batch_size: int) -> Choice:
        """The plan's choice for a batch."""
        return self.plan[self.times.bucket(batch_size)]

    def observe(self, steps: Iterable[Step]) -> None:
        """Take in what steps showed, in their order."""
        looks: dict[int, list[tuple[Choice, list[Step]]]] = defaultdict(list)
        for step in steps:
            bucket = self.times.bucket(step.batch_size)
            self._active.add(bucket)
            if not looks[bucket] or looks[bucket][-1][0] != step.choice:
                looks[bucket].append((step.choice, []))
            looks[bucket][-1][1].append(step)
            if step.choice.shape == "chain" and step.accepted:
                self.rates.observe_chain(step.requests, step.accepted[0])
            elif step.choice.shape == "tree" and step.accepted:
                self.rates.observe_tree(
                    step.requests, step.choice.width, step.accepted, step.expected, step.chain_accepted
                )
        for bucket, several in looks.items():
            for choice, seen in several:
                self.times.observe(bucket, choice, [(step.milliseconds, step.gap) for step in seen])

    def replan(self, bucket: int | None = None) -> None:
        """Plan the next period, from everything observed so far.

        The buckets that were in use are planned anew, and one other after the other; all of them the first time that
        there is anything to plan from.

        Args:
            bucket: What runs now. What was observed of it may not have arrived yet.
        """
        before, best = dict(self.plan), dict(self._best)
        self.period = self._usual_period = min(PERIOD, self._usual_period + 1)
        if self.rates.is_blank:
            return
        self._turn = (self._turn + 1) % len(self.times.buckets)
        due = self._active | {self.times.buckets[self._turn]} if self._is_planned else set(self.times.buckets)
        self._is_planned = True
        emitted = {choice: self.rates.emitted(*choice) for choice in self.choices}
        for known in self.times.buckets:
            if known in due:
                self._replan_bucket(known, emitted)
            else:
                self.plan[known] = self._best[known]  # a look that nobody runs now is none when somebody does
        running = self._active | (set() if bucket is None else {bucket})
        if any(best[known] != self._best[known] for known in running):
            self._quiet_period = PERIOD
        elif self.period == PERIOD and running and all(self._is_quiet(known, before) for known in running):
            self.lasts = {known: self._longest(known) for known in self.times.buckets}
            longest = min(self.lasts[known] for known in running)
            self.period = self._quiet_period = min(2 * self._quiet_period, longest)
        self._active.clear()

    def best(self, bucket: int) -> Choice:
        """What a bucket is verified with while nothing else is looked at."""
        return self._best[bucket]

    def table(self, bucket: int) -> list[tuple[Choice, float, float]]:
        """What a bucket's choices promise: choice, tokens a request and round, milliseconds a round."""
        return [(c, self.rates.emitted(*c), self.times.expected(bucket, c)) for c in self._allowed[bucket]]

    def encoded(self) -> list[int]:
        """The plan: the steps that it holds for, then for every bucket an index of `choices`, and `lasts`."""
        buckets = self.times.buckets
        return [
            self.period,
            *(self.choices.index(self.plan[bucket]) for bucket in buckets),
            *(self.lasts[bucket] for bucket in buckets),
        ]

    def adopt(self, encoded: Sequence[int]) -> None:
        """Take over a plan that another rank made."""
        buckets = self.times.buckets
        self.period, *told = encoded
        indices, lasts = told[: len(buckets)], told[len(buckets) :]
        self.plan = {bucket: self.choices[i] for bucket, i in zip(buckets, indices, strict=True)}
        self.lasts = dict(zip(buckets, lasts, strict=True))

    def _start(self, bucket: int) -> Choice:
        """Before anything is known: the widest tree that is no wider than the chain, which costs what DFLASH costs."""
        trees = [c for c in self._allowed[bucket] if c.shape == "tree"] or self._allowed[bucket]
        narrow = [c for c in trees if c.width <= self.rates.chain_width]
        return max(narrow) if narrow else min(trees)

    def _replan_bucket(self, bucket: int, emitted: Mapping[Choice, float]) -> None:
        """Plan one bucket: the best choice for all that is known, or one to look at."""
        rates = {choice: emitted[choice] / self.times.expected(bucket, choice) for choice in self._allowed[bucket]}
        best = max(rates, key=lambda choice: (rates[choice], -choice.width))
        if rates[best] > _ADVANTAGE * rates[self._best[bucket]]:
            self._best[bucket] = best
        may_look = bucket in self._active and self.times.is_settled(bucket)
        looked_at = self._look(bucket, rates, emitted) if may_look else None
        self.plan[bucket] = looked_at or self._best[bucket]
        if looked_at is not None and rates[looked_at] < _COSTLY * rates[self._best[bucket]]:
            self.period = min(self.period, _SHORT_LOOK)

    def _is_quiet(self, bucket: int, before: Mapping[int, Choice]) -> bool:
        """Whether a bucket that is known goes on with what it was verified with."""
        is_same = before[bucket] == self.plan[bucket] == self._best[bucket]
        return is_same and self.times.rounds(bucket) >= SEASONED

    def _longest(self, bucket: int) -> int:
        """Steps of a bucket that a plan may hold for."""
        if self.times.rounds(bucket) < SEASONED:
            return PERIOD
        took = self.times.expected(bucket, self._best[bucket])
        return max(PERIOD, min(_LONGEST, int(_LASTS / took)))

    def _look(self, bucket: int, rates: Mapping[Choice, float], emitted: Mapping[Choice, float]) -> Choice | None:
        """A choice that may well be better than the one in use, for a period.

        What is hardly known is hoped to be better than it seems, and what has not been looked at for long as well. So
        choices that seem nearly as good come round often, poor ones seldom, and none never; each costs the same small
        part of the time, because a look loses in proportion to how poor the choice is.
        """
        chosen, running = self._best[bucket], self.plan[bucket]
        known = {choice: self.times.known(bucket, choice) for choice in rates if choice != chosen}
        if (
            chosen.shape == "none" and known
        ):  # nothing is drafted: one look tells of all choices, and has the time of all
            age = len(known) * min(age for _, age in known.values()) if running == chosen else 0
            known = {choice: (measured, age) for choice, (measured, _) in known.items()}
        # What is looked at now tells of itself a period later, and is compared with what runs next.
        known = {c: found for c, found in known.items() if c != running and not self.times.is_pending(bucket, c)}
        hopes = {}
        for choice, (measured, age) in known.items():
            doubt = DOUBT * PERIOD / (PERIOD + measured) if measured else 0.0
            rate = emitted[choice] / self.times.least(bucket, choice)
            hopes[choice] = rate * (1.0 + doubt + _AGING * age)
        best = max(hopes, key=lambda choice: (hopes[choice], -choice.width), default=chosen)
        return best if best != chosen and hopes[best] > _ADVANTAGE * rates[chosen] else None
