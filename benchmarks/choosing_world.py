# SPDX-License-Identifier: Apache-2.0
"""A made-up server around the real `auto`: its chooser and observer run on a clock that this module turns.

What a step takes is invented or read from a measured run, how it scatters is invented; nothing here is a measurement of
decoding. Import it where the overlay can be imported (`overlay_modules.overlay_importable`).
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.speculative.ddtree import observing
from sglang.srt.speculative.ddtree.auto import Auto
from sglang.srt.speculative.ddtree.choice import Chooser
from sglang.srt.speculative.ddtree.observing import Observer
from sglang.srt.speculative.ddtree.round_times import Choice
from sglang.srt.speculative.ddtree.start_up_times import prior_of

from choosing_texts import BLOCK, CHOICES, NONE, WIDTHS, Requests, Text, emitted, requests_of


BUCKETS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48)
#: Nodes of a step that lanes have graphs for: `lane_sizes`.
NODES = 2080
RESULTS = Path(__file__).resolve().parent / "results"
MEASURED, OVERLAPPED = RESULTS / "0.5.11-8b-sglang-attention.json", RESULTS / "0.5.17-8b-sglang-attention.json"

#: Milliseconds of a step, by batch size and choice.
Cost = Callable[[int, Choice], float]


# What steps take.


def memory_bound(batch_size: int, choice: Choice) -> float:
    """Weights are read once whatever the width; a little is added by each token."""
    return 0.5 + (0 if choice.shape == "none" else 2.0) + 7.0 + 0.004 * batch_size * choice.width


def staircase(batch_size: int, choice: Choice) -> float:
    """Compute-bound in tiles of 128 tokens, as soon as there are more than 256 of them."""
    tiles = -(-batch_size * choice.width // 128)
    return 0.5 + (0 if choice.shape == "none" else 2.0 + 0.02 * batch_size) + max(7.0, 3.2 * tiles)


@cache
def measured(file: Path = MEASURED) -> tuple[Mapping[tuple[int, Choice], float], Callable[[int], float]]:
    """Of a run of `decode.py`: what the graphs of each bucket and choice take, and what a tree takes beside them.

    Where steps that draft nothing were no arm of it, they are taken to cost what plain decoding does, three tenths of
    it beside the graph.
    """
    run = json.loads(file.read_text())
    info = run["engines"]["ddtree"]["info"]
    verify = {(int(w), int(b)): t for w, row in info["ddtree_verify_ms"].items() for b, t in row.items()}
    draft = {int(b): t for b, t in info["ddtree_draft_ms"].items()}
    beside: dict[int, list[float]] = {}
    for cell in run["figures"]["cells"]:
        size, name, step = cell["concurrency"], cell["arm"], cell["step_ms"]["pooled"]
        if name == "plain" and "1" not in info["ddtree_verify_ms"]:
            verify[1, size] = 0.7 * step
        budget = name.removeprefix("DDTREE ")
        if budget.isdigit() and int(budget) and size in draft and (int(budget) + 1, size) in verify:
            beside.setdefault(size, []).append(step - verify[int(budget) + 1, size] - draft[size])
    sizes = sorted(beside)
    found = [statistics.median(beside[size]) for size in sizes]
    return prior_of((*CHOICES, NONE), BUCKETS, verify, draft), lambda size: float(np.interp(size, sizes, found))


def graphs(batch_size: int, choice: Choice) -> float:
    """Milliseconds of the graphs on an H200, of a batch as large as its graph."""
    return measured()[0][bucket_of(batch_size), choice]


def host_bound(batch_size: int, choice: Choice) -> float:
    """The graphs on an H200 and what the first generation's host adds, with an 8B model."""
    return graphs(batch_size, choice) + (
        0.43 * graphs(batch_size, choice) if choice == NONE else measured()[1](batch_size)
    )


def overlapped(batch_size: int, choice: Choice) -> float:
    """The second generation on an H200, an 8B model: what plain decoding takes beside its graph is the same for all."""
    found, beside = measured(OVERLAPPED)
    return found[bucket_of(batch_size), choice] + (0.85 if choice == NONE else beside(batch_size))


def overlapped_graphs(batch_size: int, choice: Choice) -> float:
    """Milliseconds of its graphs alone."""
    return measured(OVERLAPPED)[0][bucket_of(batch_size), choice]


def compute_bound(batch_size: int, choice: Choice) -> float:
    """The graphs alone, as where the host is a step ahead."""
    return graphs(batch_size, choice) + 0.3


def hidden(batch_size: int, choice: Choice) -> float:
    """A small model, whose graphs are over before the host is."""
    return max(4.0 + 0.02 * batch_size, 0.3 * graphs(batch_size, choice))


def bucket_of(batch_size: int) -> int:
    """The graph that a batch is padded to."""
    return next((bucket for bucket in BUCKETS if bucket >= batch_size), BUCKETS[-1])


def start_up(cost: Cost, *, without: float = 0.0, wrong: float = 0.01) -> dict[tuple[int, Choice], float]:
    """What a start-up measurement would say.

    Args:
        cost: What the graphs really take.
        without: Milliseconds of it that it does not see.
        wrong: Relative spread of its error.
    """
    random_ = random.Random(3)  # noqa: S311
    return {
        (bucket, choice): (cost(bucket, choice) - without) * (1 + wrong * random_.uniform(-1, 1))
        for bucket in BUCKETS
        for choice in (*CHOICES, NONE)
    }


# The server.


class _Moment:
    """A moment of a clock that `World` turns."""

    def __init__(self, world: World) -> None:
        self._world, self.at = world, world.clock

    def query(self) -> bool:
        """The copy that it stands behind needs a moment itself."""
        return self._world.clock > self.at

    def elapsed_time(self, end: _Moment) -> float:
        return end.at - self.at


@dataclass
class World:
    """Decodes batches with `auto`, and remembers what it got: the means of its choices, so that luck decides nothing.

    Args:
        cost: What a step really takes.
        prior: What start-up measured, by bucket and choice.
        choices: What can be chosen.
        fits: Whether a width has a graph at a batch size.
        noise: Relative spread of what a step takes.
        outliers: Part of the steps that take two to ten times as long.
        stalls: Part of the steps that a stall begins at: ten steps, and the gaps behind them, take four times as long.
        drift: Relative spread of a slow change of all times, of some hundred steps.
        first: How much longer the first three steps of every choice take.
        gap: Milliseconds between two steps.
        interrupted: Part of the steps that a prefill precedes; a request that ends is replaced by one as well.
        seed: Of everything that is drawn.
    """

    cost: Cost
    prior: Mapping[tuple[int, Choice], float] | None = None
    choices: tuple[Choice, ...] = CHOICES
    fits: Callable[[int, int], bool] = lambda width, size: width * size <= NODES
    noise: float = 0.05
    outliers: float = 0.01
    stalls: float = 0.0
    drift: float = 0.05
    first: float = 1.3
    gap: float = 0.5
    interrupted: float = 0.02
    seed: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)  # noqa: S311
        prior = (
            None if self.prior is None else {key: time for key, time in self.prior.items() if key[1] in self.choices}
        )
        self.chooser = Chooser(self.choices, BUCKETS, chain_width=BLOCK, prior=prior, fits=self.fits)
        self.clock, self._level, self._stalled = 0.0, 0.0, 0
        observer = Observer(WIDTHS, "cpu")
        observer._moments = SimpleNamespace(now=lambda: _Moment(self), give_back=lambda *_: None)  # noqa: SLF001
        self._auto = Auto(self.chooser, observer, SimpleNamespace(rank_in_group=0, world_size=1))
        self._places = np.zeros((2, 0), dtype=np.int64)
        self._ran: Counter[Choice] = Counter()
        self.tokens, self.milliseconds, self.best_tokens = 0.0, 0.0, 0.0
        self.history: list[Choice] = []

    def best(self, text: Text, batch_size: int) -> tuple[float, Choice]:
        """The best that any one choice gets: tokens per millisecond, and which."""
        size = bucket_of(batch_size)
        return max(
            (batch_size * emitted(text, choice) / (self.cost(size, choice) + self.gap), choice)
            for choice in self.choices
            if self.fits(choice.width, size)
        )

    def decode(self, text: Text, batch_size: int, *, steps: int = 0, milliseconds: float = 0.0) -> float:
        """Decode for so long: tokens, as a part of what the best choice for this text and batch would have got."""
        begin = self.tokens, self.best_tokens
        left, end = steps, self.milliseconds + milliseconds
        best = self.best(text, batch_size)[0]
        while left > 0 or self.milliseconds < end:
            before = self.milliseconds
            self._step(text, batch_size)
            self.best_tokens += best * (self.milliseconds - before)
            left -= 1
        return (self.tokens - begin[0]) / (self.best_tokens - begin[1])

    def _step(self, text: Text, batch_size: int) -> None:
        of = requests_of(text)
        self._admit(of, batch_size)
        choice = self._auto.begin(batch_size)
        grown = self._auto.grown_width(choice)
        self._ran[choice] += 1
        took = self.cost(bucket_of(batch_size), choice) * (self.first if self._ran[choice] <= 3 else 1.0)
        self._level = 0.99 * self._level + self._random.gauss(0.0, 0.14 * self.drift)
        scatter = (1.0 + self._level) * math.exp(self._random.gauss(0.0, self.noise))
        longer = self._stall()
        scatter *= self._random.uniform(2, 10) if self._random.random() < self.outliers else 1.0
        self.clock += took * scatter * longer
        if choice.shape != "none":
            row = _row(of, self._places, choice, grown)
            with _counted_by(lambda out: out[: len(row)].copy_(torch.from_numpy(row[: len(out)]))):
                # The tree itself is not looked at, only how wide it was grown.
                self._auto.count(SimpleNamespace(grown_scores=np.empty((1, grown))), None, None)
        self._auto.end()
        self.clock += self.gap * longer
        self.tokens += batch_size * emitted(text, choice)
        self.milliseconds += took + self.gap
        self.history.append(choice)
        self._places[1] += 1

    def _stall(self) -> float:
        """How much longer this step takes because of a stall."""
        if self.stalls and not self._stalled and self._random.random() < self.stalls:
            self.stall()
        is_stalled, self._stalled = self._stalled > 0, max(0, self._stalled - 1)
        return 4.0 if is_stalled else 1.0

    def stall(self) -> None:
        """A stall of ten steps begins now."""
        self._stalled = 10

    def _admit(self, of: Requests, batch_size: int) -> None:
        """Replace requests that are done; each brings a prefill."""
        count, steps = of.shape
        kept = self._places[:, self._places[1] < steps][:, :batch_size]
        new = batch_size - kept.shape[1]
        begun = self._random.randrange(steps) if kept.shape[1] == 0 else 0
        added = [[self._random.randrange(count), (begun + 7 * i) % steps if begun else 0] for i in range(new)]
        self._places = np.concatenate([kept, np.array(added, dtype=np.int64).reshape(-1, 2).T], axis=1)
        if new or self._random.random() < self.interrupted:
            self._auto.interrupt()
            self.clock += 20.0


def _row(of: Requests, places: Any, choice: Choice, grown: int) -> Any:
    """What the tally says of a step: as `tally.tally_step`."""
    which, step = places
    accepted, expected = of.accepted[which, step], of.expected[which, step]
    verified = WIDTHS.index(choice.width)
    known = sum(width <= grown for width in WIDTHS) - 1
    accepted[:, verified:] = accepted[:, verified : verified + 1]
    expected[:, known:] = expected[:, known : known + 1]
    told = of.chain[which, step] if choice.shape == "chain" else of.told[which, step, verified]
    return np.concatenate([accepted, expected, told[:, None]], axis=1)


@contextlib.contextmanager
def _counted_by(write: Callable[[torch.Tensor], object]) -> Iterator[None]:
    """Let the observer's count be written by a call, in the place of the kernel."""
    before = observing.tally_step
    observing.tally_step = lambda out, *_: write(out)
    try:
        yield
    finally:
        observing.tally_step = before
