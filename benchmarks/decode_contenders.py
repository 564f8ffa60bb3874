# SPDX-License-Identifier: Apache-2.0
"""Rounds of `decode.py` behind those of all arms, of nothing but what may be the best, as many as the time allows.

The best of a dozen arms, each measured a few times, is partly the luckiest, and `auto` is held against it. Most of the
arms are far behind by then, so that the time of one round of all holds several of those that are not. Who is in it is
asked before every round: an arm that was lucky falls behind, one that was kept says more about itself with each.

A round is of one concurrency, that of which least is known: where the ratio of `auto` to the best other arm has the
largest standard error. It holds every `auto` and what may be the best there: what has `NEAR` of the best other arm's
tokens per second by the same ratios as the result (`decode_figures.beside`), and is not `SURELY` standard errors behind
it. So whatever is the best has these rounds. DFLASH is in them where it may be the best. Beside an engine without
calibration a round also holds DFLASH, the chains, which show how processes differ, and the twins of its arms in the
other engine: a comparison of the two needs both.

Prompts go on where the last round of a concurrency left them.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import decode_figures
from decode_arms import UNCALIBRATED, Arm
from decode_engines import Started
from decode_plan import Cell
from decode_rounds import CLOSING, alive, cells_of, one_block
from decode_run import Run


#: What an arm needs of the best other arm's tokens per second.
NEAR = 0.93
#: Standard errors behind the best other arm from which on an arm is not the best.
SURELY = 2.0


def contend(run: Run, started: Started, arms: list[Arm], block: int) -> None:
    """Rounds of contenders until there are enough of them or none of them fits into the time any more."""
    done: Counter[int] = Counter()
    while True:
        found = run.result["measurements"]
        cells = cells_of(run, alive(started, arms), block)
        chosen = contenders(cells, found, controlled=run.options.without_calibration)
        asked = {size: several for size, several in chosen.items() if done[size] < run.options.contenders}
        left = run.left() - CLOSING
        costs = {size: run.plan.total([(size, arm) for arm in several]) for size, several in asked.items()}
        size = next((size for size, seconds in costs.items() if seconds < left), None)
        if size is None:
            break
        number = run.options.rounds + done[size]
        done[size] += 1
        if one_block(run, started, asked[size], size=size, number=number, reserve=CLOSING):
            note = {"round": number, "contenders": {size: [arm.name for arm in asked[size]]}}
            run.result["plan"].append(note | {"left": round(run.left())})
            run.save()
    if run.options.contenders:
        counts = ", ".join(f"{done[size]} at {size}" for size in sorted(done)) or "none"
        run.phase(f"contender rounds: {counts}; of {run.options.contenders} each{' (no time for more)' * bool(asked)}")


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
        doubts = {arm: decode_figures.ratio_error("tok_s", measured[size, name], measured[size, arm]) for arm in near}
        sure = {arm: SURELY * doubt for arm, doubt in doubts.items() if doubt is not None}
        behind = {arm for arm, doubt in sure.items() if ratios[arm] - doubt > row["to_best"]}
        kept.setdefault(size, set()).update({name, *(near - behind)})
        unknown[size] = max(unknown.get(size, 0.0), math.inf if error is None else error)
    arms = {}
    for size in sorted(kept, key=lambda size: -unknown[size]):
        names = kept[size]
        if controlled:
            names = {name.removesuffix(UNCALIBRATED) for name in (*names, decode_figures.CHAIN)}
            names |= {f"{name}{UNCALIBRATED}" for name in names} | {"DFLASH"}
        arms[size] = [arm for at, arm in cells if at == size and arm.name in names]
    return arms
