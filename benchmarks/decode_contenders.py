# SPDX-License-Identifier: Apache-2.0
"""Rounds of `decode.py` behind those of all arms, of nothing but what may be the best, as many as the time allows.

The best of a dozen arms, each measured a few times, is partly the luckiest, and `auto` is held against it. Most of the
arms are far behind by then, so that the time of one round of all holds several of those that are not. Who is in it is
asked before every round: an arm that was lucky falls behind, one that was kept says more about itself with each.

At each concurrency a round holds DFLASH, every `auto`, and what has `NEAR` of the best other arm's tokens per second by
the same ratios as the result (`decode_figures.beside`), so that whatever is the best there has these rounds. Beside an
engine without calibration it also holds the chains, which show how processes differ, and the twins of its arms in the
other engine: a comparison of the two needs both.

Prompts go on where the last round left them. Concurrencies come in the order of how little is known of them, those with
the largest standard error first, since any of these rounds may be the last.
"""

from __future__ import annotations

import math
from typing import Any

import decode_figures
from decode_arms import UNCALIBRATED, Arm
from decode_engines import Started
from decode_plan import Cell
from decode_rounds import CLOSING, alive, cells_of, one_block
from decode_run import Run


#: What an arm needs of the best other arm's tokens per second.
NEAR = 0.93


def contend(run: Run, started: Started, arms: list[Arm], block: int) -> None:
    """Rounds of contenders until there are enough of them or none of its blocks fits into the time any more."""
    asked, most = run.options.rounds, run.options.contenders
    for number in range(asked, asked + most):
        found = run.result["measurements"]
        chosen = contenders(
            cells_of(run, alive(started, arms), block), found, controlled=run.options.without_calibration
        )
        left, missed = run.left(), []
        for size, several in chosen.items():
            fits = run.plan.total([(size, arm) for arm in several]) < run.left() - CLOSING
            if fits and one_block(run, started, several, size=size, number=number, reserve=CLOSING):
                run.save()
            else:
                missed.append(size)
        names = {size: [arm.name for arm in several] for size, several in chosen.items() if size not in missed}
        if not names:
            run.say(f"{number - asked} of {most} contender rounds; no time for another")
            return
        run.result["plan"].append({"round": number, "contenders": names, "no_time": missed, "left": round(left)})
        run.phase(f"contender round {number - asked + 1} of {most}")


def contenders(cells: list[Cell], measurements: list[dict[str, Any]], *, controlled: bool) -> dict[int, list[Arm]]:
    """The arms of a round by concurrency, in their order; those concurrencies first of which least is known.

    A concurrency at which no `auto` was measured has none: nothing is held against the best there.
    """
    measured, served = decode_figures.by_cell(measurements), {(size, arm.name) for size, arm in cells}
    kept: dict[int, set[str]] = {}
    unknown: dict[int, float] = {}
    for row in decode_figures.autos(measurements):
        size, name, error = row["concurrency"], row["arm"], row["to_best_error"]
        if (size, name) not in served:
            continue
        ratios = decode_figures.beside(measured, size, name)
        near = {arm for arm, ratio in ratios.items() if ratio * NEAR <= row["to_best"]}
        kept.setdefault(size, set()).update({"DFLASH", name, *near})
        unknown[size] = max(unknown.get(size, 0.0), math.inf if error is None else error)
    arms = {}
    for size in sorted(kept, key=lambda size: -unknown[size]):
        names = kept[size]
        if controlled:
            names = {name.removesuffix(UNCALIBRATED) for name in (*names, decode_figures.CHAIN)}
            names |= {f"{name}{UNCALIBRATED}" for name in names}
        arms[size] = [arm for at, arm in cells if at == size and arm.name in names]
    return arms
