# SPDX-License-Identifier: Apache-2.0
"""What `decode.py` measures in which order: warm-up, settling, rounds."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any

import decode_figures
from decode_arms import Arm, concurrencies, most_rows
from decode_engines import EngineEndedError, Started
from decode_plan import Cell, Round, groups_of, settling
from decode_run import Run
from decode_stages import stages, stages_seconds


#: Seconds that are left for saving and for closing the engines.
CLOSING = 6


def warm_up(run: Run, started: Started, arms: list[Arm]) -> None:
    """Compile what is compiled at first use, and learn how long the prefill of each concurrency takes."""
    sizes = concurrencies(run.options)
    for size in (sizes[-1], *reversed(sizes)):
        begin = time.monotonic()
        for arm in alive(started, arms)[:1]:
            if attempted(run, started, arm, size, tokens=2, seconds=60):
                run.plan.prefill[size] = time.monotonic() - begin
    for arm in arms:
        attempted(run, started, arm, sizes[0], seconds=30)


def settle(run: Run, started: Started, arms: list[Arm]) -> None:
    """Let every `auto` decode for a while at each concurrency, before its choices count; the plan learns the pace.

    All of it takes no more than a share of the time that is left: a short run is to have rounds.
    """
    autos = [arm for arm in arms if arm.is_auto]
    seconds = settling(run.options, len(autos), run.left())
    for size in concurrencies(run.options):
        for arm in autos:
            settled, groups, took = time.monotonic() + seconds, groups_of(run.options, size), 0.0
            begin = time.monotonic()
            while begin < settled and attempted(run, started, arm, size, share=1 / groups):
                took, begin = time.monotonic() - begin, time.monotonic()
            if took:
                run.plan.note(size, arm, took * groups)


def attempted(run: Run, started: Started, arm: Arm, size: int, **changes: Any) -> bool:
    """A measurement whose figures are nobody's: False when the engine was lost by it, or before."""
    if arm.engine not in started.engines:
        return False
    known = list(run.result["dropped"])
    try:
        run.measure(started, arm, size, 0, **changes)
        run.result["dropped"] = known  # what a round lacks is told there
    except EngineEndedError as failure:
        run.lost(started, failure)
        return False
    return True


def alive(started: Started, arms: list[Arm]) -> list[Arm]:
    """Arms whose engine answers."""
    return [arm for arm in arms if arm.engine in started.engines]


def cells_of(run: Run, arms: list[Arm], block: int) -> list[Cell]:
    """What a round can hold: every arm at every concurrency for which it has a graph."""
    sizes, unserved = concurrencies(run.options), {}
    for arm in arms:
        unserved[arm.name] = [size for size in sizes if not arm.served(size, block, most_rows(run.options))]
    run.result["without_graph"] = {name: missing for name, missing in unserved.items() if missing}
    return [(size, arm) for size in sizes for arm in arms if size not in unserved[arm.name]]


def rounds(run: Run, started: Started, arms: list[Arm], block: int) -> None:
    """All rounds, as far as the time goes; behind the first one the stages, so that they are had in any case."""
    count = run.options.rounds
    for number in range(count):
        cells = cells_of(run, alive(started, arms), block)
        reserve = CLOSING + (stages_seconds(run, alive(started, arms)) if number == 0 else 0)
        found = run.result["measurements"]
        chosen = run.plan.choose(cells, found, rounds=count - number, seconds=run.left() - reserve)
        tell(run, number, len(cells), chosen, run.left() - reserve)
        for size, several in chosen.arms.items():
            if not one_block(run, started, several, size=size, number=number, reserve=reserve):
                run.drop(f"from concurrency {size} in round {number + 1} on: no time left")
                return
            run.save()
        run.phase(f"round {number + 1} of {count}")
        if number == 0:
            stages(run, started, arms, block)
            run.phase("stages measured")


def tell(run: Run, number: int, cells: int, chosen: Round, left: float) -> None:
    """Say what a round holds, and whether the rounds that are left fit."""
    seconds, out = chosen.seconds, chosen.left_out
    note = {"round": number, "cells": cells, "left_out": out, "seconds": round(seconds), "left": round(left)}
    run.result["plan"].append(note)
    text = f"round {number + 1}: {cells - len(out)} of {cells} cells, about {seconds:.0f} s; {left:.0f} s are left"
    if out:
        text += f", so without {', '.join(out[:4])}{' …' if len(out) > 4 else ''}"
    asked = run.options.rounds - number
    if run.plan.total([(size, arm) for size, arms in chosen.arms.items() for arm in arms], main=True) * asked > left:
        text += f"; TOO SHORT for {asked} rounds of the main arms"
    run.say(text)


def one_block(run: Run, started: Started, arms: list[Arm], *, size: int, number: int, reserve: float) -> bool:
    """All arms at one concurrency, prompt by prompt: False when the time is over, and then nothing of it counts.

    One prompt says little about acceptance: at concurrency 1 several follow each other, and each goes through all arms
    before the next one, there and back, so that whatever else the host does meets all of them.
    """
    # One arm after the other, then back: what drifts meanwhile meets both ways. The order is another one every two
    # rounds: behind an arm of another engine, caches are cold, and none is to follow one of those more than others do.
    groups = groups_of(run.options, size)
    order = random.Random(number // 2).sample(arms, len(arms))  # noqa: S311  (an order, no secret)
    parts: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in arms}
    took, chosen = Counter[str](), {arm.name: Counter[str]() for arm in arms}
    for group in range(groups):
        for arm in order if (number + group) % 2 == 0 else order[::-1]:
            if run.left() < reserve + run.plan.cost(size, arm) / groups:
                return False
            if arm.engine not in started.engines:
                continue
            begin = time.monotonic()
            try:
                found, steps = observed(run, started, arm, size=size, prompts=number * groups + group, groups=groups)
            except EngineEndedError as failure:
                run.lost(started, failure)
                continue
            took[arm.name] += time.monotonic() - begin
            parts[arm.name] += [found] if found else []
            chosen[arm.name].update(steps)
    for arm in arms:
        together = decode_figures.together(parts[arm.name], size)
        # A ratio needs the same prompts on both sides.
        if together and len(parts[arm.name]) == groups:
            run.plan.note(size, arm, took[arm.name])
            entry = {"round": number, "concurrency": size, "arm": arm.name, **together}
            run.result["measurements"].append(entry | ({"chosen": chosen[arm.name]} if chosen[arm.name] else {}))
    return True


def observed(
    run: Run, started: Started, arm: Arm, *, size: int, prompts: int, groups: int
) -> tuple[dict[str, Any] | None, Counter[str]]:
    """A measurement of a round; of `auto` also how often it took which choice, where the server counts its steps.

    One without a whole step is made again, once and if there is time: where the host stalls, the time can be over
    before all requests run. One whose steps had another budget is none: an engine whose memory held no graph of the
    arm's for so many requests takes what it was configured with, and says nothing.
    """
    known = list(run.result["dropped"])
    asked: dict[str, Any] = {"size": size, "prompts": prompts, "share": 1 / groups}
    found, steps = measured(run, started, arm, **asked)
    if not found and run.left() > CLOSING + run.plan.cost(size, arm):
        run.result["dropped"] = known
        found, steps = measured(run, started, arm, **asked)
    if arm.is_auto:
        return found, steps
    if arm.budget is None or not found or not steps:
        return found, Counter()
    own = "none" if arm.budget == 0 else str(arm.budget)
    if 2 * steps[own] < steps.total():
        taken = steps.most_common(1)[0][0]
        run.drop(f"{arm.name} at concurrency {size}: its engine has no graph of it, and took {taken}")
        return None, Counter()
    return found, Counter()


def measured(
    run: Run, started: Started, arm: Arm, *, size: int, prompts: int, share: float
) -> tuple[dict[str, Any] | None, Counter[str]]:
    """A measurement, and the steps that its engine took meanwhile by what they were drafted with.

    Engines that count none are asked as well: what that does to caches and to the interpreter is to meet all arms.
    """
    engine = started.engines[arm.engine]
    before = Counter(engine.ask({"info": True}, 20).get("ddtree_steps") or {})
    found = run.measure(started, arm, size, prompts, share)
    return found, Counter(engine.ask({"info": True}, 20).get("ddtree_steps") or {}) - before
