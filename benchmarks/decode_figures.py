# SPDX-License-Identifier: Apache-2.0
"""From the steps of `decode.py` to its figures; `decode_figures.py RESULT.json` prints a run's tables again."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any


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
    "rounds": "Each round measures all arms at one concurrency after the other, then the next concurrency; rounds use "
    "different prompts and begin with different arms. median, min and max are over rounds; pooled is over the tokens "
    "and times of all rounds together.",
    "to_dflash": "tok_s over DFLASH's of the same rounds, which decode the same prompts.",
    "to_best": "tok_s over the best other arm's, pooled over the rounds that both ran.",
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


def ratio(figure: str, mine: Rounds, other: Rounds) -> float | None:
    """Of a figure, over the rounds that both arms ran."""
    both = sorted(mine.keys() & other.keys())
    return pooled(mine, both)[figure] / pooled(other, both)[figure] if both else None


def cells(measurements: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for every concurrency and arm that was measured."""
    rows, found = [], by_cell(measurements)
    for (concurrency, arm), rounds in found.items():
        control = found.get((concurrency, "DFLASH"), {})
        both = [number for number in rounds if number in control]
        row: dict[str, Any] = {"concurrency": concurrency, "arm": arm}
        whole = pooled(rounds, rounds)
        for figure in ("tok_s", "step_ms", "accept"):
            row[figure] = spread([entry[figure] for entry in rounds.values()]) | {"pooled": whole[figure]}
        chosen: dict[str, int] = {}
        for entry in rounds.values():
            for choice, count in entry.get("chosen", {}).items():
                chosen[choice] = chosen.get(choice, 0) + count
        if chosen:
            row["chosen"] = chosen
        if both:
            row["to_dflash"] = spread([rounds[number]["tok_s"] / control[number]["tok_s"] for number in both])
            row["to_dflash"]["pooled"] = ratio("tok_s", rounds, control)
            row["accept_ratio"] = ratio("accept", rounds, control)
        rows.append(row)
    return rows


def verify_ms(stages: list[dict[str, Any]], concurrency: int) -> dict[int, float]:
    """The target's forward by its width, milliseconds: medians of the steps that were timed."""
    times: dict[int, list[float]] = {}
    for entry in stages:
        if entry["concurrency"] == concurrency:
            for step in entry["steps"]:
                if "verify" in step["ms"] and step.get("width"):
                    times.setdefault(int(step["width"]), []).append(step["ms"]["verify"])
    return {width: statistics.median(found) for width, found in sorted(times.items())}


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


def efficiencies(result: dict[str, Any], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For every tree of fixed width: the limit that its verify sets, and how close it gets."""
    block, found = result["block"], []
    for row in rows:
        arm = next((arm for arm in result["arms"] if arm["name"] == row["arm"]), None)
        if not arm or not isinstance(arm["budget"], int) or "to_dflash" not in row:
            continue
        width, staged = arm["budget"] + 1, verify_ms(result["stages"], row["concurrency"])
        alone = replays(result, row["concurrency"])
        times, source = (alone, "replay") if {width, block} <= alone.keys() else (staged, "stage")
        if not {width, block} <= times.keys():
            continue
        control = next(r for r in rows if r["arm"] == "DFLASH" and r["concurrency"] == row["concurrency"])
        own = control["step_ms"]["pooled"]
        limit = own / (own + times[width] - times[block])
        possible = row["accept_ratio"] * limit
        found.append(
            {
                "concurrency": row["concurrency"],
                "arm": row["arm"],
                "accept_ratio": row["accept_ratio"],
                "measured_by": source,
                "verify_ms": times[width],
                "verify_ms_of_block": times[block],
                "verify_stage_ms": staged.get(width),
                "limit": limit,
                "possible": possible,
                "to_dflash": row["to_dflash"]["pooled"],
                "efficiency": row["to_dflash"]["pooled"] / possible,
            }
        )
    return found


def replays(result: dict[str, Any], concurrency: int) -> dict[int, float]:
    """Milliseconds of a verify graph replayed alone at start-up, by width, where the servers report them."""
    found: dict[int, float] = {}
    for engine in result["engines"].values():
        for width, times in (engine["info"].get("ddtree_verify_ms") or {}).items():
            if str(concurrency) in times:
                found[int(width)] = times[str(concurrency)]
    return found


def autos(rows: list[dict[str, Any]], measurements: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`auto` beside the best arm and beside DFLASH at every concurrency."""
    found, measured = [], by_cell(measurements)
    for row in rows:
        if row["arm"] != "DDTREE auto":
            continue
        concurrency = row["concurrency"]
        # The best of what an operator could have set; an arm without calibration is a control.
        ratios = {
            arm: ratio("tok_s", measured[concurrency, row["arm"]], rounds)
            for (size, arm), rounds in measured.items()
            if size == concurrency and arm != row["arm"] and "uncalibrated" not in arm
        }
        known = {arm: value for arm, value in ratios.items() if value is not None}
        if not known:
            continue
        best = min(known, key=lambda arm: known[arm])
        found.append(
            {
                "concurrency": concurrency,
                "tok_s": row["tok_s"]["pooled"],
                "best": best,
                "to_best": known[best],
                "to_dflash": known.get("DFLASH"),
                "chosen": row.get("chosen", {}),
            }
        )
    return found


def figures(result: dict[str, Any]) -> dict[str, Any]:
    """All figures of a result file."""
    rows = cells(result["measurements"])
    return {
        "cells": rows,
        "stages": stage_means(result["stages"]),
        "efficiency": efficiencies(result, rows),
        "auto": autos(rows, result["measurements"]),
    }


def report(result: dict[str, Any]) -> str:
    """The tables of a run as text: tokens per second, then what the issue asks of trees and of `auto`."""
    found = result["figures"]
    sizes = sorted({row["concurrency"] for row in found["cells"]})
    rows_of = {(row["arm"], row["concurrency"]): row for row in found["cells"]}
    lines = [["tok/s (x DFLASH)", *(f"c={size}" for size in sizes), f"accept c={sizes[0]}" if sizes else "", "rounds"]]
    for arm in dict.fromkeys(row["arm"] for row in found["cells"]):
        line = [arm]
        for size in sizes:
            row = rows_of.get((arm, size))
            times = row["to_dflash"]["pooled"] if row and "to_dflash" in row else 0
            line.append(f"{row['tok_s']['pooled']:.0f} ({times:.2f})" if row else "-")
        first = next(row for row in found["cells"] if row["arm"] == arm)
        counts = [rows_of[arm, size]["tok_s"]["n"] for size in sizes if (arm, size) in rows_of]
        lines.append([*line, f"{first['accept']['pooled']:.2f}", f"{min(counts)}-{max(counts)}"])
    text = [table(lines)]
    if found["auto"]:
        rows = [
            [
                f"c={r['concurrency']}",
                r["best"],
                f"{r['to_best']:.3f}",
                f"{r['to_dflash'] or 0:.3f}",
                shares(r["chosen"]),
            ]
            for r in found["auto"]
        ]
        text.append(table([["auto", "best other arm", "auto/best", "auto/DFLASH", "chosen"], *rows]))
    if found["efficiency"]:
        head = ["limit", "accept x", "verify ms", "limit", "possible", "got", "efficiency"]
        rows = [
            [
                f"c={r['concurrency']} {r['arm']}",
                f"{r['accept_ratio']:.3f}",
                f"{r['verify_ms']:.2f}",
                f"{r['limit']:.3f}",
                f"{r['possible']:.3f}",
                f"{r['to_dflash']:.3f}",
                f"{r['efficiency']:.3f}",
            ]
            for r in found["efficiency"]
        ]
        text.append(table([head, *rows]))
    for row in found["stages"]:
        parts = " ".join(f"{name} {ms:.3f}" for name, ms in row["ms"].items())
        text.append(f"c={row['concurrency']} {row['arm']}: {parts} ms ({row['steps']} steps)")
    for engine, memory in result.get("memory", {}).items():
        held, kept = (memory.get(name, 0) / 2**30 for name in ("allocated", "reserved"))
        text.append(f"peak memory of {engine}: {held:.1f} GiB in tensors, {kept:.1f} GiB reserved")
    text += [f"not measured: {note}" for note in result["dropped"]]
    return "\n".join(text)


def shares(counts: dict[str, int]) -> str:
    """The most frequent choices and how often they were taken."""
    most = sorted(counts.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{choice} {count / sum(counts.values()):.0%}" for choice, count in most)


def table(lines: list[list[str]]) -> str:
    """Aligned text; the first line is the head."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in lines)


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    print(report(given | {"figures": figures(given)}))
