# SPDX-License-Identifier: Apache-2.0
"""From the steps of `decode.py` to its figures; `decode_report` prints them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Any

import decode_efficiency
import decode_verdicts
from decode_arms import UNCALIBRATED


#: The arm that drafts DFLASH's chain in the engine of trees.
CHAIN = "DDTREE chain"
#: What the figures mean; written into every result.
DEFINITIONS = {
    "measurement": "All requests of a concurrency start at once and are decoded greedily until each has its N tokens, "
    "or for a limited time; those that have theirs go on, so that the concurrency stays. At concurrency 1 some prompts "
    "follow each other.",
    "tok_s": "Output tokens per second of decoding at this concurrency, c x N over the mean time in which a request "
    "gets N tokens behind its first decode step: by a clock in the scheduler's process, from the end of a step to the "
    "end of another. A step that crosses N counts by its share; a request that has not got there in time counts with "
    "its speed so far. Prefill and tail do not count; scheduling and host work do.",
    "accept": "N over the mean number of steps in which a request gets N tokens: the target's own token included.",
    "step_ms": "Time from step to step while all requests ran.",
    "rounds": "Each round measures all arms at one concurrency after the other, the next round (and at small "
    "concurrencies the next prompt) in the opposite order; rounds use different prompts. median, min and max are over "
    "rounds; pooled is over the tokens and times of all rounds together.",
    "to_dflash": "tok_s over DFLASH's of the same rounds, which decode the same prompts.",
    "contenders": "Rounds behind those of all arms hold only what may be the best at a concurrency: auto and the arms "
    "near the best other one (and chains, beside a control), by what was measured before each of them. Each is of the "
    "concurrency of which least is known then, by to_best_error.",
    "to_best": "tok_s over the best other arm's, pooled over the rounds that both ran. The best is the one that this "
    "is least for, so chance makes the figure too small, the more so the more arms are near each other.",
    "error": "Of a ratio: the standard error of the mean, over rounds, of the logarithm of the ratio in a round, times "
    "the ratio (to_best 0.95, to_best_error 0.03: 0.95 +- 0.03). It holds what prompts and moments differ by. It does "
    "not hold what processes differ by as long as they run, nor the choice of the best. `median` is that of the "
    "ratios of the rounds: far from the pooled one where one round decides.",
    "calibration": "An arm over the same one in an engine without calibration; `processes` is the same for chains, on "
    "which calibration has no influence, and `alike` is tok_s over that.",
    "limit": "What the verify's width alone leaves of DFLASH's step rate: step(DFLASH) / (step(DFLASH) + verify(W) - "
    "verify(block)); verify times are those of graphs replayed alone at start-up (`replay`), or of the stage of a step "
    "(`stage`), which holds the device's waiting for the host.",
    "efficiency": "to_dflash over (accept ratio x limit): how much of what trees can give at this width arrives.",
}


def window(steps: list[list[Any]], concurrency: int, tokens: int) -> dict[str, float] | None:
    """How long a request takes for its tokens while all of them run; None when there are no two such steps.

    Args:
        steps: [time, kind, tokens of each request, finished], as `step_clock` wrote them.
        concurrency: Requests of the measurement.
        tokens: That each request has to get.

    Returns:
        Means over the requests, `seconds` and `steps` for `tokens`; `reached`, the share that got there; and the
        `span` of all steps, in seconds and in steps.
    """
    whole: list[list[Any]] = []
    for step in steps:
        if step[1] == "d" and len(step[2]) == concurrency and not step[3]:
            whole.append(step)
        elif len(whole) > 1:
            break
        else:
            whole = []
    if len(whole) < 2:
        return None
    seconds, counts, reached = 0.0, 0.0, 0
    for request in range(concurrency):
        at = [step[2][request] - whole[0][2][request] for step in whole]
        cross = next((number for number, count in enumerate(at) if count >= tokens), None)
        if cross is None:
            # Never there: at the speed it has had.
            stretch = tokens / max(at[-1], 1)
            seconds += stretch * (whole[-1][0] - whole[0][0])
            counts += stretch * (len(whole) - 1)
            continue
        share = (tokens - at[cross - 1]) / (at[cross] - at[cross - 1])
        seconds += whole[cross - 1][0] + share * (whole[cross][0] - whole[cross - 1][0]) - whole[0][0]
        counts += cross - 1 + share
        reached += 1
    return {
        "tokens": tokens,
        "seconds": seconds / concurrency,
        "steps": counts / concurrency,
        "reached": reached / concurrency,
        "span_seconds": whole[-1][0] - whole[0][0],
        "span_steps": len(whole) - 1,
    }


def together(windows: list[dict[str, float]], concurrency: int) -> dict[str, float] | None:
    """The figures of one or more windows; None when there are none."""
    if not windows:
        return None
    sums = {name: sum(found[name] for found in windows) for name in windows[0]}
    return sums | {
        "reached": sums["reached"] / len(windows),
        "tok_s": concurrency * sums["tokens"] / sums["seconds"],
        "step_ms": 1e3 * sums["span_seconds"] / sums["span_steps"],
        "accept": sums["tokens"] / sums["steps"],
    }


def spread(values: list[float]) -> dict[str, float]:
    """Median, smallest, largest and how many."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}


Rounds = dict[int, dict[str, Any]]


def by_cell(measurements: list[dict[str, Any]]) -> dict[tuple[int, str], Rounds]:
    """Measurements by concurrency and arm, and there by round."""
    found: dict[tuple[int, str], Rounds] = {}
    for entry in measurements:
        found.setdefault((entry["concurrency"], entry["arm"]), {})[entry["round"]] = entry
    return found


def pooled(rounds: Rounds, numbers: Iterable[int]) -> dict[str, float]:
    """The figures over the tokens of several rounds together."""
    names = ("tokens", "seconds", "steps", "reached", "span_seconds", "span_steps")
    several = [rounds[number] for number in numbers]
    found = together([{name: entry[name] for name in names} for entry in several], several[0]["concurrency"])
    assert found
    return found


def by_round(figure: str, mine: Rounds, other: Rounds) -> dict[int, float]:
    """The logarithm of a figure's ratio in each round that both arms ran."""
    return {number: math.log(mine[number][figure] / other[number][figure]) for number in mine.keys() & other.keys()}


def error(value: float | None, logarithms: Iterable[float]) -> float | None:
    """The standard error of a ratio (`DEFINITIONS`); None where one round says nothing about it."""
    found = list(logarithms)
    return value * statistics.stdev(found) / math.sqrt(len(found)) if value and len(found) > 1 else None


def ratio(figure: str, mine: Rounds, other: Rounds) -> float | None:
    """Of a figure, over the rounds that both arms ran."""
    both = sorted(mine.keys() & other.keys())
    return pooled(mine, both)[figure] / pooled(other, both)[figure] if both else None


def ratio_error(figure: str, mine: Rounds, other: Rounds) -> float | None:
    """The standard error of `ratio`."""
    return error(ratio(figure, mine, other), by_round(figure, mine, other).values())


def cells(measurements: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for every concurrency and arm that was measured."""
    rows, found = [], by_cell(measurements)
    for (concurrency, arm), rounds in found.items():
        control = found.get((concurrency, "DFLASH"), {})
        both = [number for number in rounds if number in control]
        row: dict[str, Any] = {"concurrency": concurrency, "arm": arm, "rounds": sorted(rounds)}
        whole = pooled(rounds, rounds)
        for figure in ("tok_s", "step_ms", "accept"):
            row[figure] = spread([entry[figure] for entry in rounds.values()]) | {"pooled": whole[figure]}
        if chosen := choices(rounds):
            row["chosen"] = chosen
        if both:
            row["to_dflash"] = spread([rounds[number]["tok_s"] / control[number]["tok_s"] for number in both])
            row["to_dflash"]["pooled"] = ratio("tok_s", rounds, control)
            row["accept_ratio"] = ratio("accept", rounds, control)
        rows.append(row)
    return rows


def stage_means(stages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Milliseconds of each stage of an arm's steps: medians, so that one late step does not count."""
    rows = []
    for entry in stages:
        if entry["steps"]:
            names = list(dict.fromkeys(name for step in entry["steps"] for name in step["ms"]))
            ms = {name: statistics.median(step["ms"].get(name, 0.0) for step in entry["steps"]) for name in names}
            rows.append(
                {"concurrency": entry["concurrency"], "arm": entry["arm"], "steps": len(entry["steps"]), "ms": ms}
            )
    return rows


def beside(measured: dict[tuple[int, str], Rounds], concurrency: int, name: str) -> dict[str, float]:
    """tok_s of an `auto` over that of each other arm at its concurrency, pooled over the rounds that both ran.

    Of what an operator could have set: arms with and without calibration are not mixed.
    """
    ratios = {
        arm: ratio("tok_s", measured[concurrency, name], rounds)
        for (size, arm), rounds in measured.items()
        if size == concurrency
        and arm != name
        and (not arm.startswith("DDTREE") or arm.endswith(UNCALIBRATED) == name.endswith(UNCALIBRATED))
    }
    return {arm: value for arm, value in ratios.items() if value is not None}


def autos(measurements: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`auto` beside the best arm and beside DFLASH at every concurrency."""
    found, measured = [], by_cell(measurements)
    for concurrency, name in sorted(measured, key=lambda cell: cell[0]):
        if not name.startswith("DDTREE auto"):
            continue
        own, known = measured[concurrency, name], beside(measured, concurrency, name)
        if not known:
            continue
        best = min(known, key=lambda arm: known[arm])
        logs = by_round("tok_s", own, measured[concurrency, best]).values()
        found.append(
            {
                "concurrency": concurrency,
                "arm": name,
                "tok_s": pooled(own, own)["tok_s"],
                "best": best,
                "to_best": known[best],
                "to_best_error": error(known[best], logs),
                "to_best_median": math.exp(statistics.median(logs)),
                "to_best_rounds": len(logs),
                "to_dflash": known.get("DFLASH"),
                "to_dflash_error": ratio_error("tok_s", own, measured.get((concurrency, "DFLASH"), {})),
                "chosen": choices(own),
            }
        )
    return found


def choices(rounds: Rounds) -> dict[str, int]:
    """How often `auto` took which choice."""
    found: dict[str, int] = {}
    for entry in rounds.values():
        for choice, count in entry.get("chosen", {}).items():
            found[choice] = found.get(choice, 0) + count
    return found


def calibrations(measurements: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every arm beside the same one without calibration, in the same rounds.

    The two are served by different processes. Chains do not depend on calibration: their ratio is what the processes
    differ by.
    """
    found, measured = [], by_cell(measurements)
    for concurrency, name in measured:
        control = measured.get((concurrency, f"{name}{UNCALIBRATED}"))
        if control is None or name == CHAIN:
            continue
        own = measured[concurrency, name]
        chains = [measured.get((concurrency, f"{CHAIN}{end}"), {}) for end in ("", UNCALIBRATED)]
        speed, logs = ratio("tok_s", own, control), by_round("tok_s", own, control)
        processes, process_logs = ratio("tok_s", *chains), by_round("tok_s", *chains)
        if speed is None:
            continue
        row = {"concurrency": concurrency, "arm": name, "rounds": len(logs)}
        row |= {"tok_s": speed, "tok_s_error": error(speed, logs.values())}
        row |= {"accept": ratio("accept", own, control), "accept_error": ratio_error("accept", own, control)}
        row |= {"processes": processes, "processes_error": error(processes, process_logs.values())}
        row["alike"] = alike = speed / processes if processes else None
        both = logs.keys() & process_logs.keys()
        row["alike_error"] = error(alike, [logs[number] - process_logs[number] for number in both])
        found.append(row)
    return found


#: Of a result whose figures could not be made.
NOTHING: dict[str, Any] = {
    "cells": [],
    "stages": [],
    "efficiency": [],
    "auto": [],
    "calibration": [],
    "verdicts": [],
}


def figures(result: dict[str, Any]) -> dict[str, Any]:
    """All figures of a result file."""
    rows = cells(result["measurements"])
    found = {
        "cells": rows,
        "stages": stage_means(result["stages"]),
        "efficiency": decode_efficiency.efficiencies(result, rows),
        "auto": autos(result["measurements"]),
        "calibration": calibrations(result["measurements"]),
    }
    return found | {"verdicts": decode_verdicts.verdicts(result, found)}
