# SPDX-License-Identifier: Apache-2.0
"""From runs to cells: medians, spread, latencies, and whether two arms differ. Pure."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddtree_overlay.errors import OverlayError
from ddtree_overlay.tuning.plan import Run
from ddtree_overlay.tuning.served import AUTO, CHAIN


#: Fewer rounds than this say nothing about a spread.
LEAST_ROUNDS = 3
#: A smaller difference is none, however steady it is.
LEAST_GAIN = 0.01


@dataclass(frozen=True, slots=True)
class Reply:
    """One request: seconds until it was answered, tokens, verify steps (0 when the server did not say), or an error."""

    seconds: float
    tokens: int = 0
    steps: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """One run.

    Args:
        run: Which one.
        seconds: From the first request sent to the last one answered.
        replies: Its requests.
        chosen: Verify steps of the server meanwhile, by what they were drafted with; empty when it does not say.
    """

    run: Run
    seconds: float
    replies: tuple[Reply, ...]
    chosen: Mapping[str, int] = field(default_factory=dict)

    @property
    def good(self) -> tuple[Reply, ...]:
        """The requests that were answered well."""
        return tuple(r for r in self.replies if not r.error)

    @property
    def tokens_per_s(self) -> float:
        """Throughput; 0 when nothing came back."""
        return sum(r.tokens for r in self.good) / self.seconds if self.seconds > 0 else 0.0


@dataclass(slots=True)
class Measured:
    """What was measured.

    Args:
        samples: The runs that count, warm-up left out.
        stopped: Why it ended before the plan did, or "".
        error: The fault behind that, if it was one.
        interrupted: Whether it was Ctrl-C.
        disturbed: Runs that were thrown away because others' requests ran beside them.
    """

    samples: list[Sample] = field(default_factory=list)
    stopped: str = ""
    error: OverlayError | None = None
    interrupted: bool = False
    disturbed: int = 0


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with the least and the greatest value."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of one or more values."""
        return cls(statistics.median(values), min(values), max(values))

    def as_dict(self) -> dict[str, float]:
        """The spread as `--json` prints it."""
        return {"median": _short(self.median), "min": _short(self.least), "max": _short(self.most)}


@dataclass(frozen=True, slots=True)
class Difference:
    """One arm against another at one concurrency, by the ratios of their tokens/s in each round both were measured.

    Args:
        ratio: The spread of the ratios.
        rounds: How many there are.
        verdict: `faster` or `slower` when that is so in every round, by more than 1 % in the median; `none` when rounds
            disagree or it is less; `unknown` with fewer than three rounds.
    """

    ratio: Spread
    rounds: int
    verdict: str

    def as_dict(self) -> dict[str, Any]:
        """The difference as `--json` prints it."""
        return {**self.ratio.as_dict(), "rounds": self.rounds, "verdict": self.verdict}


@dataclass(frozen=True, slots=True)
class Cell:
    """One arm at one concurrency. Latencies are seconds of a request; `accept_length` is tokens a verify step."""

    arm: str
    concurrency: int
    tokens_per_s: Spread
    by_round: Mapping[int, float]
    accept_length: float | None
    p50: float
    p95: float
    requests: int
    errors: Mapping[str, int] = field(default_factory=dict)
    chosen: Mapping[str, int] = field(default_factory=dict)

    @property
    def asked(self) -> float | None:
        """The share of the steps that were drafted as the arm asks; None for `auto`, and where none were counted."""
        total = sum(self.chosen.values())
        return self.chosen.get(self.arm, 0) / total if total and self.arm != AUTO else None

    def as_dict(self) -> dict[str, Any]:
        """The cell as `--json` prints it."""
        return {
            "arm": self.arm,
            "concurrency": self.concurrency,
            "rounds": len(self.by_round),
            "tokens_per_s": self.tokens_per_s.as_dict(),
            "accept_length": None if self.accept_length is None else _short(self.accept_length),
            "latency_s": {"p50": _short(self.p50), "p95": _short(self.p95)},
            "requests": self.requests,
            "errors": dict(self.errors),
            "steps": dict(self.chosen),
        }


def cells(samples: Iterable[Sample]) -> list[Cell]:
    """The cells by concurrency, the chain first and `auto` last; an arm without one whole run has none."""
    grouped: dict[tuple[int, str], list[Sample]] = {}
    for sample in samples:
        if not sample.run.warm_up:
            grouped.setdefault((sample.run.concurrency, sample.run.arm.name), []).append(sample)
    found = [_cell(arm, concurrency, group) for (concurrency, arm), group in grouped.items()]
    return sorted(filter(None, found), key=_place)


def _place(cell: Cell) -> tuple[int, int, int]:
    kind = {CHAIN: 0, AUTO: 2}.get(cell.arm, 1)
    return cell.concurrency, kind, int(cell.arm) if cell.arm.isdecimal() else 0


def _cell(arm: str, concurrency: int, samples: Sequence[Sample]) -> Cell | None:
    # A run in which some requests failed had fewer in flight, so that its rate is another concurrency's.
    whole = {s.run.round: s.tokens_per_s for s in samples if s.good and len(s.good) == len(s.replies)}
    good = [r for s in samples for r in s.good]
    if not whole:
        return None
    stepped = [r for r in good if r.steps]
    steps = sum(r.steps for r in stepped)
    seconds = sorted(r.seconds for r in good)
    return Cell(
        arm=arm,
        concurrency=concurrency,
        tokens_per_s=Spread.of(list(whole.values())),
        by_round=whole,
        accept_length=sum(r.tokens for r in stepped) / steps if steps else None,
        p50=quantile(seconds, 0.5),
        p95=quantile(seconds, 0.95),
        requests=len(good),
        errors=errors(samples),
        chosen=sum((Counter(s.chosen) for s in samples), Counter()),
    )


def errors(samples: Iterable[Sample]) -> dict[str, int]:
    """Each error and how often it came."""
    return dict(Counter(r.error for s in samples for r in s.replies if r.error))


def quantile(ordered: Sequence[float], share: float) -> float:
    """The least of the ordered values that `share` of them do not exceed (nearest rank)."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def difference(cell: Cell, base: Cell) -> Difference | None:
    """`cell` against `base`; None when no round has both, or nothing came back in one."""
    ratios = [cell.by_round[r] / base.by_round[r] for r in cell.by_round if base.by_round.get(r)]
    if not ratios:
        return None
    ratio = Spread.of(ratios)
    if len(ratios) < LEAST_ROUNDS:
        verdict = "unknown"
    elif ratio.least > 1 and ratio.median >= 1 + LEAST_GAIN:
        verdict = "faster"
    elif ratio.most < 1 and ratio.median <= 1 - LEAST_GAIN:
        verdict = "slower"
    else:
        verdict = "none"
    return Difference(ratio, len(ratios), verdict)


def against_chain(cell: Cell, table: Iterable[Cell]) -> Difference | None:
    """`cell` against the chain at its concurrency; None for the chain itself and where it was not measured."""
    same = (c for c in table if c.arm == CHAIN and c.concurrency == cell.concurrency)
    chain = next(same, None)
    return difference(cell, chain) if chain and cell.arm != CHAIN else None


def _short(value: float) -> float:
    """Five digits that count: more is noise."""
    return float(f"{value:.5g}")
