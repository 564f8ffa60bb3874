# SPDX-License-Identifier: Apache-2.0
"""Made-up texts for `choosing_world`: what trees of each width accept of them, and what the drafter expected.

Import it where the overlay can be imported (`overlay_modules.overlay_importable`).
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from sglang.srt.speculative.ddtree.round_times import Choice


WIDTHS = (3, 5, 9, 16, 33, 65, 129)
BLOCK = 16
CHOICES = (*(Choice(width) for width in WIDTHS), Choice(BLOCK, "chain"))
NONE = Choice(1, "none")


@dataclass(frozen=True)
class Text:
    """How a drafter fares on a kind of text: the probability of its first choice, and how true that is."""

    #: Mean probability that the drafter gives its first choice, and how far requests differ in it.
    confidence: float
    #: Exponent between the drafter's distribution and the target's: above 1, the drafter is too shy.
    truth: float = 1.0
    #: What part of the positions the drafter knows nothing about, whatever it says.
    blind: float = 0.0
    spread: float = 0.1


CODE = Text(0.85, 1.3)
PROSE = Text(0.55, 1.2)
HARD = Text(0.42, 1.0)
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


def sample(text: Text, confidence: float, random_: random.Random) -> Sample:
    """Draw one step of a text, of a request with a confidence of its own."""
    levels, path, alive = [], [], True
    for depth in range(BLOCK - 1):
        first = min(0.98, max(0.1, random_.gauss(confidence, 0.15) * 0.985**depth))
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


class Requests:
    """Requests of a text, and each one's steps: arrays [requests, steps, widths], and of the chain without widths."""

    def __init__(self, text: Text, count: int = 24, steps: int = 24) -> None:
        random_ = random.Random(5)  # noqa: S311
        own = [min(0.95, max(0.2, random_.gauss(text.confidence, text.spread))) for _ in range(count)]
        drawn = [[sample(text, confidence, random_) for _ in range(steps)] for confidence in own]
        self.shape = count, steps
        self.expected, self.accepted, self.chain, self.told = (
            np.array([[getattr(one, name) for one in steps] for steps in drawn], dtype=np.float32)
            for name in ("expected", "accepted", "chain", "chain_told")
        )


@cache
def requests_of(text: Text) -> Requests:
    """Requests of a text, drawn once."""
    return Requests(text)


def emitted(text: Text, choice: Choice) -> float:
    """Tokens that a choice really gets out of a step of a text."""
    of = requests_of(text)
    if choice.shape == "none":
        return 1.0
    accepted = of.chain if choice.shape == "chain" else of.accepted[:, :, WIDTHS.index(choice.width)]
    return 1.0 + float(accepted.mean())
