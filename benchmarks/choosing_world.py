# SPDX-License-Identifier: Apache-2.0
"""A made-up server around the real `auto`: its chooser and observer run on a clock that this module turns.

What a step takes is invented or read from a measured run, how it scatters is invented; nothing here is a measurement of
decoding. Import it where the overlay can be imported (`overlay_modules.overlay_importable`).
"""

from __future__ import annotations

import contextlib
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.speculative.ddtree import observing
from sglang.srt.speculative.ddtree.auto import Auto
from sglang.srt.speculative.ddtree.choice import Chooser
from sglang.srt.speculative.ddtree.observing import Observer

from choosing_costs import BUCKETS, Cost, bucket_of
from choosing_texts import BLOCK, CHOICES, WIDTHS, Requests, Text, emitted, requests_of


if TYPE_CHECKING:
    from sglang.srt.speculative.ddtree.round_times import Choice


#: Nodes of a step that lanes have graphs for: `lane_sizes`.
NODES = 2080
#: Milliseconds that a phase of the host lasts, from and to.
_PHASE = (200.0, 5000.0)


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
        phases: The slowest that the host gets for a while, as a multiple of its best: it changes at random, for
            `_PHASE` milliseconds, and all choices take so much longer.
        device: What a step takes at least, however fast the host is: no phase makes that longer.
        first: How much longer the first three steps of every choice take.
        gap: Milliseconds between two steps.
        host: Milliseconds that the host needs for a round: as long as a step and the gap behind it take together at
            least.
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
    phases: float = 1.0
    device: Cost | None = None
    first: float = 1.3
    gap: float = 0.5
    host: float = 0.0
    interrupted: float = 0.02
    seed: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)  # noqa: S311
        prior = (
            None if self.prior is None else {key: time for key, time in self.prior.items() if key[1] in self.choices}
        )
        self.chooser = Chooser(self.choices, BUCKETS, chain_width=BLOCK, prior=prior, fits=self.fits)
        self.clock, self._level, self._stalled = 0.0, 0.0, 0
        self._phase, self._phase_ends = 1.0, 0.0
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
            (batch_size * emitted(text, choice) / self._round(self._cost(size, choice)), choice)
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
            if self.device is not None:  # what is best depends on the phase that the step was in
                best = self.best(text, batch_size)[0]
            self.best_tokens += best * (self.milliseconds - before)
            left -= 1
        return (self.tokens - begin[0]) / (self.best_tokens - begin[1])

    def _step(self, text: Text, batch_size: int) -> None:
        of = requests_of(text)
        self._admit(of, batch_size)
        choice = self._auto.begin(batch_size)
        grown = self._auto.grown_width(choice)
        self._ran[choice] += 1
        self._level = 0.99 * self._level + self._random.gauss(0.0, 0.14 * self.drift)
        scatter = (1.0 + self._level) * math.exp(self._random.gauss(0.0, self.noise))
        longer = self._stall() * self._slow()
        took = self._cost(bucket_of(batch_size), choice) * (self.first if self._ran[choice] <= 3 else 1.0)
        scatter *= self._random.uniform(2, 10) if self._random.random() < self.outliers else 1.0
        begun = self.clock
        self.clock += took * scatter * longer
        if choice.shape != "none":
            row = _row(of, self._places, choice, grown)
            with _counted_by(lambda out: out[: len(row)].copy_(torch.from_numpy(row[: len(out)]))):
                # The tree itself is not looked at, only how wide it was grown.
                self._auto.count(SimpleNamespace(grown_scores=np.empty((1, grown))), None, None)
        self._auto.end()
        self.clock = begun + longer * self._round((self.clock - begun) / longer)
        self.tokens += batch_size * emitted(text, choice)
        self.milliseconds += self._round(took)
        self.history.append(choice)
        self._places[1] += 1

    def _cost(self, size: int, choice: Choice) -> float:
        """Milliseconds of a step in the phase that the host is in, over how much longer everything takes in it."""
        took = self.cost(size, choice)
        return took if self.device is None else max(took, self.device(size, choice) / self._phase)

    def _round(self, step: float) -> float:
        """Milliseconds from the beginning of a step to that of the next one."""
        return max(step + self.gap, self.host)

    def _stall(self) -> float:
        """How much longer this step takes because of a stall."""
        if self.stalls and not self._stalled and self._random.random() < self.stalls:
            self.stall()
        is_stalled, self._stalled = self._stalled > 0, max(0, self._stalled - 1)
        return 4.0 if is_stalled else 1.0

    def _slow(self) -> float:
        """How much longer everything takes in the phase that the host is in."""
        if self.phases > 1.0 and self.clock >= self._phase_ends:
            self._phase = self._random.uniform(1.0, self.phases)
            self._phase_ends = self.clock + math.exp(self._random.uniform(*map(math.log, _PHASE)))
        return self._phase

    def pause(self, milliseconds: float) -> None:
        """Something else runs for so long."""
        self._auto.interrupt()
        self.clock += milliseconds

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
