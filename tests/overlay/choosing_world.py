# SPDX-License-Identifier: Apache-2.0
"""A made-up engine for the choice of widths: texts with real trees over them, and what a round of them takes."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from sglang.srt.speculative.ddtree.choice import Chooser, Step
from sglang.srt.speculative.ddtree.round_times import Choice


WIDTHS = (3, 5, 9, 16, 33, 65, 129)
BLOCK = 16
CHOICES = (*(Choice(width) for width in WIDTHS), Choice(BLOCK, "chain"))
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48)


@dataclass(frozen=True)
class Text:
    """How a drafter fares on a kind of text: the probability of its first choice, and how true that is."""

    #: Mean probability that the drafter gives its first choice.
    confidence: float
    #: Exponent between the drafter's distribution and the target's: above 1, the drafter is too shy.
    truth: float = 1.0
    #: What part of the positions the drafter knows nothing about, whatever it says.
    blind: float = 0.0


CODE = Text(0.85, 1.3)
PROSE = Text(0.55, 1.2)
BLUFF = Text(0.9, 1.0, blind=0.97)


@dataclass(frozen=True)
class Sample:
    """One request's step: the estimate and the truth for every width, and the chain."""

    expected: tuple[float, ...]
    accepted: tuple[int, ...]
    chain: int
    #: What a step of each width tells of the chain: exact within the tree, estimated where it leaves it.
    chain_told: tuple[float, ...]


def grow(levels: Sequence[Sequence[float]], budget: int) -> list[tuple[float, tuple[int, ...]]]:
    """The best-first tree by the paper's heap: (probability, ranks) of each node, likeliest first."""
    nodes: list[tuple[float, tuple[int, ...]]] = []
    heap = [(-levels[0][0], (0,))]
    while heap and len(nodes) < budget:
        negative, ranks = heapq.heappop(heap)
        nodes.append((-negative, ranks))
        depth, rank = len(ranks) - 1, ranks[-1]
        if rank + 1 < len(levels[depth]):
            sibling = -negative / levels[depth][rank] * levels[depth][rank + 1]
            heapq.heappush(heap, (-sibling, (*ranks[:-1], rank + 1)))
        if depth + 1 < len(levels):
            heapq.heappush(heap, (negative * levels[depth + 1][0], (*ranks, 0)))
    return nodes


def sample(text: Text, random_: random.Random) -> Sample:
    """Draw one step of a text."""
    levels, path, alive = [], [], True
    for depth in range(BLOCK - 1):
        first = min(0.98, max(0.1, random_.gauss(text.confidence, 0.15) * 0.985**depth))
        level = [first * (1 - first) ** rank for rank in range(6)]
        levels.append(level)
        powers = [p**text.truth for p in level] + [max(1e-9, 1 - sum(level)) ** text.truth]
        rank = 6 if random_.random() < text.blind else random_.choices(range(7), powers)[0]
        alive = alive and rank < 6
        if alive:
            path.append(rank)
    nodes = grow(levels, WIDTHS[-1] - 1)
    index = {ranks: i + 1 for i, (_, ranks) in enumerate(nodes)}
    on_path = [index[tuple(path[: d + 1])] for d in range(len(path)) if tuple(path[: d + 1]) in index]
    chain = next((d for d, rank in enumerate(path) if rank), len(path))
    return Sample(
        expected=tuple(sum(p for p, _ in nodes[: width - 1]) for width in WIDTHS),
        accepted=tuple(sum(node < width for node in on_path) for width in WIDTHS),
        chain=chain,
        chain_told=tuple(chain_told(sum(n < width for n in on_path[:chain]), chain, levels) for width in WIDTHS),
    )


def chain_told(seen: int, chain: int, levels: Sequence[Sequence[float]]) -> float:
    """Accepted tokens of the chain in the tree; one more that the target's next token shows, then the estimate."""
    if seen == chain:
        return float(seen)
    likely, rest = 1.0, 0.0
    for level in levels[seen + 1 :]:
        likely *= level[0]
        rest += likely
    return seen + 1 + rest


@cache
def samples(text: Text, count: int = 300) -> list[Sample]:
    """Steps of a text."""
    random_ = random.Random(5)
    return [sample(text, random_) for _ in range(count)]


def emitted(text: Text, choice: Choice) -> float:
    """Tokens that a choice really gets out of a step of a text."""
    drawn = samples(text)
    if choice.shape == "none":
        return 1.0
    if choice.shape == "chain":
        return 1.0 + sum(s.chain for s in drawn) / len(drawn)
    return 1.0 + sum(s.accepted[WIDTHS.index(choice.width)] for s in drawn) / len(drawn)


#: Milliseconds of a step, by batch size and choice.
Cost = Callable[[int, Choice], float]


@dataclass
class World:
    """Decodes a batch with a chooser, and remembers what it got.

    Args:
        noise: Relative spread of what a step takes; one step in a hundred takes tenfold as well.
        gap: Milliseconds between two steps.
        interrupted: Part of the steps that a prefill precedes.
        disturbed: How much longer the first eight steps of every choice are measured to take.
    """

    chooser: Chooser
    cost: Cost
    noise: float = 0.0
    gap: float = 0.3
    interrupted: float = 0.0
    disturbed: float = 1.0

    def __post_init__(self) -> None:
        self._random = random.Random(11)
        self._late: list[Step] = []
        self._recent: list[Step] = []
        self.tokens, self.milliseconds = 0.0, 0.0
        self.history: list[tuple[float, Choice]] = []
        self._steps, self._left = 0, self.chooser.period

    def decode(self, text: Text, batch_size: int, milliseconds: float) -> float:
        """Decode for so long: tokens per millisecond."""
        tokens, start = self.tokens, self.milliseconds
        while self.milliseconds < start + milliseconds:
            self._step(text, batch_size)
        return (self.tokens - tokens) / (self.milliseconds - start)

    def best(self, text: Text, batch_size: int) -> tuple[float, Choice]:
        """The best that any one choice gets: tokens per millisecond, and which."""
        return max(
            (batch_size * emitted(text, choice) / (self.cost(batch_size, choice) + self.gap), choice)
            for choice in self.chooser.choices
        )

    def _step(self, text: Text, batch_size: int) -> None:
        choice = self.chooser.choose(batch_size)
        drawn = [self._random.choice(samples(text)) for _ in range(batch_size)]
        took = self.cost(batch_size, choice)
        self.tokens += batch_size * emitted(text, choice)  # the mean, so that luck does not decide a test
        self.milliseconds += took + self.gap
        self.history.append((self.milliseconds, choice))
        measured = took * max(0.2, self._random.gauss(1.0, self.noise))
        if self.noise and self._random.random() < 0.01:
            measured *= 10
        if sum(ran == choice for _, ran in self.history) <= 8:
            measured *= self.disturbed
        interrupted = self._random.random() < self.interrupted
        grown = len(WIDTHS) if self._steps % 8 == 0 else sum(w <= choice.width for w in WIDTHS) + 1
        is_tree = choice.shape == "tree"
        rings = range(sum(w <= choice.width for w in WIDTHS))
        self._recent.append(
            Step(
                batch_size,
                choice,
                batch_size,
                milliseconds=measured,
                gap=None if interrupted else self.gap,
                accepted=[sum(s.accepted[r] for s in drawn) for r in rings]
                if is_tree
                else [sum(s.chain for s in drawn)]
                if choice.shape == "chain"
                else (),
                expected=[sum(s.expected[r] for s in drawn) for r in range(len(WIDTHS))][:grown] if is_tree else (),
                chain_accepted=sum(s.chain_told[len(rings) - 1] for s in drawn) if is_tree else 0.0,
            )
        )
        self._steps += 1
        self._left -= 1
        if not self._left:
            # What the device counted arrives a period late.
            self.chooser.observe(self._late)
            self._late, self._recent = self._recent, []
            self.chooser.replan()
            self._left = self.chooser.period


def memory_bound(batch_size: int, choice: Choice) -> float:
    """Weights are read once whatever the width; a little is added by each token."""
    return 0.5 + (0 if choice.shape == "none" else 2.0) + 7.0 + 0.004 * batch_size * choice.width


def staircase(batch_size: int, choice: Choice) -> float:
    """Compute-bound in tiles of 128 tokens, as soon as there are more than 256 of them."""
    tiles = -(-batch_size * choice.width // 128)
    return 0.5 + (0 if choice.shape == "none" else 2.0 + 0.02 * batch_size) + max(7.0, 3.2 * tiles)


def prior_of(cost: Cost, *, wrong: float = 0.0) -> dict[tuple[int, Choice], float]:
    """What a start-up measurement would say: nothing of the half millisecond beside the graphs.

    Args:
        cost: What steps really take.
        wrong: Relative spread of its error.
    """
    random_ = random.Random(3)
    return {
        (bucket, choice): (cost(bucket, choice) - 0.5) * (1 + wrong * random_.uniform(-1, 1))
        for bucket in BUCKETS
        for choice in CHOICES
    }
