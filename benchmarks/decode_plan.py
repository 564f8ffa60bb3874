# SPDX-License-Identifier: Apache-2.0
"""How long a round of `decode.py` takes, and which arms are in it when the time does not hold all of them.

The main arms are in every round. The others are let in by how near they are to the best of them at their concurrency,
as long as every round that was asked for can hold them. Of what was not measured yet those come first whose steps have
about as many rows as the best ones had on a large GPU. So what could be the best has all rounds, and what is left out
is far from it: wide trees of many requests, narrow ones of a few.
"""

from __future__ import annotations

import argparse
import math
import statistics
from dataclasses import dataclass
from typing import Any

import decode_figures
from decode_arms import UNCALIBRATED, Arm, concurrencies


#: In every round, whatever the time.
MAIN = ("plain", "DFLASH", "DDTREE auto", f"DDTREE auto{UNCALIBRATED}")
#: Rows of a step about which trees were fastest on an H200 with an 8B target, whatever the concurrency.
BEST_ROWS = 128
#: Rows of a request without a budget of its own, about.
BLOCK = 16
#: Seconds beside prefill and decoding that a measurement takes: requests come and go, records are written.
OVERHEAD = 0.05
#: Tokens a step, and how many times as many steps as the mean the slowest request takes, which all others wait for.
ACCEPT, SLOWEST = 2.5, 1.2
#: Milliseconds of a step of an 8B target on an H200, and of each row in it.
STEP_MS, ROW_MS = 7.0, 0.02
#: What was not measured may differ from its guess by so much more than what was.
CAUTION = 1.25
#: Plain decoding is as fast on one prompt as on another, and needs no longer time.
PLAIN_SHARE = 0.4
#: Five engines started beside each other, cold, as the median of several runs; prefill.
START_SECONDS, PREFILL_TOKENS, PREFILL_SECONDS = 140.0, 40_000, 0.03
#: Trees that may be the best at a concurrency, as a guess for a plan.
NEAR = 4

#: Settling takes no more of the time behind the start.
SETTLING = 0.25

Cell = tuple[int, Arm]


def groups_of(options: argparse.Namespace, size: int) -> int:
    """Batches of prompts that a measurement consists of: at small concurrencies one says little about acceptance."""
    return max(1, options.singles // size)


def settling(options: argparse.Namespace, autos: int, left: float) -> float:
    """Seconds that each of so many `auto` decodes at each concurrency before the rounds."""
    cells = autos * len(concurrencies(options))
    return min(float(options.settle), max(left, 0.0) * SETTLING / cells) if cells else 0.0


@dataclass(frozen=True)
class Round:
    """What a round is to hold: the arms of each concurrency, seconds, and how many cells were left out for the time."""

    arms: dict[int, list[Arm]]
    seconds: float
    left_out: list[str]


class Plan:
    """Seconds that a measurement of an arm takes at a concurrency: measured ones, or a guess before there are any.

    The guess is for an 8B target on an H200. What is measured of some arms corrects that of the others.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.prefill = {size: self._guessed_prefill(size) for size in concurrencies(options)}
        self._measured: dict[tuple[int, str], list[float]] = {}
        self._guesses: dict[tuple[int, str], float] = {}

    def _guessed_prefill(self, size: int) -> float:
        return PREFILL_SECONDS + size * self.options.prompt_tokens / PREFILL_TOKENS

    def note(self, size: int, arm: Arm, seconds: float) -> None:
        """An arm has taken so long at a concurrency, all its batches of prompts together."""
        self._measured.setdefault((size, arm.name), []).append(seconds)
        self._guesses[size, arm.name] = self.guess(size, arm)

    def cost(self, size: int, arm: Arm) -> float:
        """Seconds of one arm at one concurrency in one round."""
        known = self._measured.get((size, arm.name))
        return statistics.median(known) if known else self.guess(size, arm) * self.pace()

    def guess(self, size: int, arm: Arm) -> float:
        """The same before anything is measured: steps until the slowest request has its tokens, or until time is up."""
        groups, plain = groups_of(self.options, size), arm.name == "plain"
        rows = 1 if plain else arm.rows(BLOCK)
        steps = self.options.tokens * (SLOWEST / ACCEPT if rows > 1 else 1)
        decoding = groups * steps * (STEP_MS + ROW_MS * size * rows) / 1e3
        most = self.options.seconds * (PLAIN_SHARE if plain else 1)
        return min(decoding, most) + groups * (self.prefill[size] + OVERHEAD)

    def pace(self) -> float:
        """What the measured cells have taken over their guesses; cautiously, where that is less."""
        if not self._measured:
            return 1
        took = sum(statistics.median(found) for found in self._measured.values()) / sum(self._guesses.values())
        return min(max(took, 1), CAUTION * took)

    def choose(self, cells: list[Cell], measurements: list[dict[str, Any]], *, rounds: int, seconds: float) -> Round:
        """The next of `rounds` that are left and have to fit into `seconds`."""
        share = seconds / rounds
        if not measurements:
            # The first round may be longer: it says which arms are worth the others.
            share = max(share, seconds - (rounds - 1) * self.total(cells, main=True))
        return self.fill(cells, worths(measurements), share)

    def total(self, cells: list[Cell], *, main: bool = False) -> float:
        """Seconds of a round of these cells, or of the main arms among them."""
        return sum(self.cost(*cell) for cell in cells if not main or self.is_main(cell[1].name))

    def is_main(self, name: str) -> bool:
        """Whether an arm is in every round: beside a control also what shows how far processes differ by themselves."""
        return name in MAIN or (self.options.without_calibration and name.startswith(decode_figures.CHAIN))

    def fill(self, cells: list[Cell], worth: dict[tuple[int, str], float], share: float) -> Round:
        """The main arms, and of the others as many as `share` seconds hold, those of most worth first."""
        kept = {(size, arm.name) for size, arm in cells if self.is_main(arm.name)}
        total, left_out = self.total(cells, main=True), []
        others = [cell for cell in cells if not self.is_main(cell[1].name)]
        others.sort(key=lambda cell: -worth.get((cell[0], cell[1].name), expected(*cell)))
        for size, arm in others:
            if total + self.cost(size, arm) <= share:
                total += self.cost(size, arm)
                kept.add((size, arm.name))
            else:
                left_out.append(f"{arm.name} at {size}")
        arms: dict[int, list[Arm]] = {}
        for size, arm in cells:
            if (size, arm.name) in kept:
                arms.setdefault(size, []).append(arm)
        return Round(arms, total, left_out)


def expected(size: int, arm: Arm) -> float:
    """Of what was not measured: tokens per second over the best tree's, for an order that has to begin somewhere."""
    return 0.9 - 0.1 * abs(math.log2(size * arm.rows(BLOCK) / BEST_ROWS))


def worths(measurements: list[dict[str, Any]]) -> dict[tuple[int, str], float]:
    """Tokens per second of each arm over the best tree's at its concurrency, by what is known so far."""
    rows = [row for row in decode_figures.cells(measurements) if "to_dflash" in row]
    best: dict[int, float] = {}
    for row in rows:
        if row["arm"].startswith("DDTREE"):
            best[row["concurrency"]] = max(best.get(row["concurrency"], 0.0), row["to_dflash"]["pooled"])
    return {
        (row["concurrency"], row["arm"]): row["to_dflash"]["pooled"] / best[row["concurrency"]]
        for row in rows
        if best.get(row["concurrency"])
    }


def guessed_contenders(plan: Plan, served: list[Cell]) -> list[Cell]:
    """About what a contender round of each concurrency holds (`decode_contenders.py`): `auto` and the nearest trees."""
    found = [(size, arm) for size, arm in served if arm.is_auto]
    for size in plan.prefill:
        others = [cell for cell in served if cell[0] == size and not plan.is_main(cell[1].name)]
        found += sorted(others, key=lambda cell: -expected(*cell))[:NEAR]
    return found


def sketch(options: argparse.Namespace, arms: list[Arm], served: list[Cell]) -> str:
    """What --plan prints: how long a run of these arms may take, before anything is known of the machine."""
    plan = Plan(options)
    whole, main = plan.total(served), plan.total(served, main=True)
    autos, around = sum(arm.is_auto for arm in arms), START_SECONDS + 10 + len(arms)
    around += settling(options, autos, options.limit - around) * len(plan.prefill) * autos
    left = options.limit - around
    text = [
        f"{len(arms)} arms, {len(served)} cells a round; {options.rounds} rounds in {options.limit:.0f} s",
        f"  start, texts, warm-up, settling, stages: about {around:.0f} s; left for rounds: {left:.0f} s",
        f"  a round of all arms: about {whole:.0f} s, of the main ones: about {main:.0f} s",
    ]
    fits = plan.fill(served, {}, left / options.rounds)
    if not fits.left_out:
        text.append(f"  all arms fit into all {options.rounds} rounds")
        seconds = plan.total(guessed_contenders(plan, served))
        count = min(int((left - whole * options.rounds) / seconds), options.contenders) if seconds else 0
        text.append(
            f"  behind them about {count} of {options.contenders} contender rounds of {seconds:.0f} s, each of all"
        )
    elif main * options.rounds <= left:
        text.append(f"  every round holds the main arms and, as a guess, {len(served) - len(fits.left_out)} cells")
        text.append("  the others, farthest from the best first, get fewer rounds")
    else:
        text.append(f"  TOO SHORT: {int(left // main)} rounds of the main arms; raise --limit, or lower --rounds")
    return "\n".join(text)
