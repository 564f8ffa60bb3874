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
from sglang.srt.speculative.ddtree.round_times import Choice, RoundTimes


#: Decode steps that a plan holds for: while there is something to find out, and when nothing has changed for so many
#: periods.
PERIOD, LONG_PERIOD, _SETTLED = 8, 24, 12
#: A choice replaces another one that is in use if it promises so much more.
_ADVANTAGE = 1.012
#: Part of a bucket's time that may be lost to looking at choices that seem worse.
_LOOKING = 0.012
#: Of that, the part that one choice may cost: one that is known, and one that was hardly measured yet.
_AGAIN, _FIRST = 0.25, 0.6
#: A choice is not looked at again before so many periods.
_REST = 6


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
        #: Steps that the plan holds for.
        self.period = PERIOD
        self._active: set[int] = set()
        self._turn = 0
        self._periods, self._changed = 0, 0
        #: Milliseconds that looks may cost by now, by bucket, and milliseconds since a choice was looked at in one.
        self._saved: dict[int, float] = defaultdict(float)
        self._waited: dict[tuple[int, Choice], float] = defaultdict(float)

    def choose(self, batch_size: int) -> Choice:
        """The plan's choice for a batch."""
        return self.plan[self.times.bucket(batch_size)]

    def observe(self, steps: Iterable[Step]) -> None:
        """Take in what steps showed, in their order."""
        took: dict[tuple[int, Choice], tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
        for step in steps:
            bucket = self.times.bucket(step.batch_size)
            self._active.add(bucket)
            for value, values in zip((step.milliseconds, step.gap), took[bucket, step.choice], strict=True):
                if value is not None:
                    values.append(value)
            if step.choice.shape == "chain" and step.accepted:
                self.rates.observe_chain(step.requests, step.accepted[0])
            elif step.choice.shape == "tree" and step.accepted:
                self.rates.observe_tree(
                    step.requests, step.choice.width, step.accepted, step.expected, step.chain_accepted
                )
        for (bucket, choice), (times, gaps) in took.items():
            self.times.observe(bucket, choice, times, gaps)

    def replan(self) -> None:
        """Plan the next period, from everything observed so far.

        The buckets that were in use are planned anew, and one other after the other; all of them the first time that
        there is anything to plan from.
        """
        if self.rates.is_blank:
            return
        first, self._periods = self._periods == 0, self._periods + 1
        self._turn = (self._turn + 1) % len(self.times.buckets)
        due = set(self.times.buckets) if first else self._active | {self.times.buckets[self._turn]}
        emitted = {choice: self.rates.emitted(*choice) for choice in self.choices}
        looking = [self._replan_bucket(bucket, emitted) for bucket in sorted(due)]
        self._active.clear()
        settled = self._periods - self._changed > _SETTLED and not any(looking)
        self.period = LONG_PERIOD if settled else PERIOD

    def best(self, bucket: int) -> Choice:
        """What a bucket is verified with while nothing else is looked at."""
        return self._best[bucket]

    def table(self, bucket: int) -> list[tuple[Choice, float, float]]:
        """What a bucket's choices promise: choice, tokens a request and round, milliseconds a round."""
        return [(c, self.rates.emitted(*c), self.times.expected(bucket, c)) for c in self._allowed[bucket]]

    def encoded(self) -> list[int]:
        """The plan: the steps that it holds for, then an index of `choices` for every bucket."""
        return [self.period, *(self.choices.index(self.plan[bucket]) for bucket in self.times.buckets)]

    def adopt(self, encoded: Sequence[int]) -> None:
        """Take over a plan that another rank made."""
        self.period, *indices = encoded
        self.plan = {bucket: self.choices[i] for bucket, i in zip(self.times.buckets, indices, strict=True)}

    def _start(self, bucket: int) -> Choice:
        """Before anything is known: the widest tree that is no wider than the chain, which costs what DFLASH costs."""
        trees = [c for c in self._allowed[bucket] if c.shape == "tree"] or self._allowed[bucket]
        narrow = [c for c in trees if c.width <= self.rates.chain_width]
        return max(narrow) if narrow else min(trees)

    def _replan_bucket(self, bucket: int, emitted: Mapping[Choice, float]) -> bool:
        """Plan one bucket; whether the plan is to look at a choice there."""
        times = {choice: self.times.expected(bucket, choice) for choice in self._allowed[bucket]}
        rates = {choice: emitted[choice] / time for choice, time in times.items()}
        best = max(rates, key=lambda choice: (rates[choice], -choice.width))
        if rates[best] > _ADVANTAGE * rates[self._best[bucket]]:
            self._best[bucket], self._changed = best, self._periods
        chosen = self._best[bucket]
        looked_at = self._look(bucket, chosen, emitted, times) if bucket in self._active else None
        self.plan[bucket] = looked_at or chosen
        return looked_at is not None

    def _look(
        self, bucket: int, chosen: Choice, emitted: Mapping[Choice, float], times: Mapping[Choice, float]
    ) -> Choice | None:
        """A choice to look at for a period, if one has not been for so long that the loss does not matter.

        A period of a choice loses the time that the chosen one would have needed less for the same tokens. Looks are
        paid from a small part of the bucket's time, and each choice waits until its own loss is small beside the wait:
        choices that seem nearly as good come round often, poor ones seldom, and none never.
        """
        period = PERIOD * times[chosen]
        others = [choice for choice in times if choice != chosen]
        losses = {
            choice: PERIOD * max(0.0, times[choice] - emitted[choice] / emitted[chosen] * times[chosen])
            for choice in others
        }
        if chosen.shape == "none" and others:  # nothing is drafted, so one look tells of all choices
            others = [min(others, key=lambda choice: (losses[choice], choice))]
        passed = self.period * times[chosen]
        self._saved[bucket] += _LOOKING * passed
        due = []
        for choice in others:
            self._waited[bucket, choice] += passed
            age = self.times.age(bucket, choice)
            is_doubtful = self.times.is_doubtful(bucket, choice)
            part = 1.0 if len(others) == 1 else _FIRST if is_doubtful else _AGAIN
            wait = max(_REST * period, losses[choice] / (part * _LOOKING))
            if age != 0.0 and losses[choice] <= self._saved[bucket] and self._waited[bucket, choice] >= wait:
                due.append((self._waited[bucket, choice] / wait, choice))
        if not due:
            return None
        choice = max(due)[1]
        self._saved[bucket] -= losses[choice]
        self._waited[bucket, choice] = 0.0
        return choice
