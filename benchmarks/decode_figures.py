# SPDX-License-Identifier: Apache-2.0
"""From the steps of `decode.py` to its figures; `decode_figures.py RESULT.json` prints a run's tables again."""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from pathlib import Path
from typing import Any


#: What the figures mean; written into every result.
DEFINITIONS = {
    "measurement": "All requests of a concurrency start at once; they are decoded greedily until the first has all its "
    "tokens or the window is over, and the rest is aborted.",
    "tok_s": "Output tokens per second of decoding at exactly this concurrency: over the steps in which every request "
    "ran, from the end of the step before to the end of the step, by a clock in the scheduler's process. Prefill, ramp "
    "and tail do not count; scheduling and host work do.",
    "accept": "Tokens per request and step in the same steps, the target's own token included.",
    "step_ms": "Time from step to step in the same steps.",
    "to_dflash": "tok_s over DFLASH's of the same round, which decodes the same prompts.",
    "rounds": "Each round measures all arms at one concurrency after the other, then the next concurrency; rounds use "
    "different prompts and begin with different arms. Figures are medians over rounds, with the smallest and largest.",
    "limit": "What the verify's width alone leaves of DFLASH's step rate: step(DFLASH) / (step(DFLASH) + verify(W) - "
    "verify(block)), verify times from CUDA events around the target's forward.",
    "efficiency": "to_dflash over (accept ratio x limit): how much of what trees can give at this width arrives.",
}


def window(steps: list[list[Any]], concurrency: int) -> dict[str, float] | None:
    """Tokens, seconds and count of the steps in which all requests ran; None when there are none.

    Args:
        steps: [time, kind, requests, tokens of all of them, finished], as `step_clock` wrote them.
        concurrency: Requests of the measurement.
    """
    tokens, seconds, count = 0, 0.0, 0
    for before, step in itertools.pairwise(steps):
        decoded = before[1] == step[1] == "d" and before[2] == step[2] == concurrency
        # A step that ends a request may have cut its tokens.
        if decoded and not before[4] and not step[4]:
            tokens, seconds, count = tokens + step[3] - before[3], seconds + step[0] - before[0], count + 1
    if not count:
        return None
    return {
        "tokens": tokens,
        "seconds": seconds,
        "steps": count,
        "tok_s": tokens / seconds,
        "step_ms": 1e3 * seconds / count,
        "accept": tokens / (count * concurrency),
    }


def spread(values: list[float]) -> dict[str, float]:
    """Median, smallest, largest and how many."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}


def cells(measurements: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for every concurrency and arm that was measured."""
    by_cell: dict[tuple[int, str], dict[int, dict[str, Any]]] = {}
    for found in measurements:
        by_cell.setdefault((found["concurrency"], found["arm"]), {})[found["round"]] = found
    rows = []
    for (concurrency, arm), rounds in by_cell.items():
        control = by_cell.get((concurrency, "DFLASH"), {})
        both = [number for number in rounds if number in control]
        row: dict[str, Any] = {"concurrency": concurrency, "arm": arm}
        for figure in ("tok_s", "step_ms"):
            row[figure] = spread([found[figure] for found in rounds.values()])
        row["accept"] = pooled(rounds.values())
        chosen: dict[str, int] = {}
        for found in rounds.values():
            for choice, count in found.get("chosen", {}).items():
                chosen[choice] = chosen.get(choice, 0) + count
        if chosen:
            row["chosen"] = chosen
        if both:
            row["to_dflash"] = spread([rounds[number]["tok_s"] / control[number]["tok_s"] for number in both])
            row["accept_ratio"] = pooled(rounds[n] for n in both) / pooled(control[n] for n in both)
        rows.append(row)
    return rows


def pooled(found: Any) -> float:
    """Tokens per request and step over several measurements."""
    several = list(found)
    return sum(m["tokens"] for m in several) / sum(m["steps"] * m["concurrency"] for m in several)


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
    alone = next(
        (e["info"]["ddtree_verify_ms"] for e in result["engines"].values() if e["info"].get("ddtree_verify_ms")), {}
    )
    for row in rows:
        arm = next((arm for arm in result["arms"] if arm["name"] == row["arm"]), None)
        if not arm or not isinstance(arm["budget"], int) or "to_dflash" not in row:
            continue
        times = verify_ms(result["stages"], row["concurrency"])
        width = arm["budget"] + 1
        if width not in times or block not in times:
            continue
        step = next(r for r in rows if r["arm"] == "DFLASH" and r["concurrency"] == row["concurrency"])
        own = step["step_ms"]["median"]
        limit = own / (own + times[width] - times[block])
        possible = row["accept_ratio"] * limit
        found.append(
            {
                "concurrency": row["concurrency"],
                "arm": row["arm"],
                "accept_ratio": row["accept_ratio"],
                "verify_ms": times[width],
                "verify_ms_of_block": times[block],
                # A replay of the graph alone at start-up, on short sequences.
                "replay_ms": alone.get(str(width), {}).get(str(row["concurrency"])),
                "limit": limit,
                "possible": possible,
                "to_dflash": row["to_dflash"]["median"],
                "efficiency": row["to_dflash"]["median"] / possible,
            }
        )
    return found


def autos(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`auto` beside the best arm and beside DFLASH at every concurrency."""
    found = []
    for row in rows:
        if row["arm"] != "DDTREE auto":
            continue
        # The best of what an operator could have set; an arm without calibration is a control.
        others = [
            other
            for other in rows
            if other["concurrency"] == row["concurrency"] and other is not row and "uncalibrated" not in other["arm"]
        ]
        if not others:
            continue
        best = max(others, key=lambda other: other["tok_s"]["median"])
        found.append(
            {
                "concurrency": row["concurrency"],
                "tok_s": row["tok_s"]["median"],
                "best": best["arm"],
                "to_best": row["tok_s"]["median"] / best["tok_s"]["median"],
                "to_dflash": row.get("to_dflash", {}).get("median"),
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
        "auto": autos(rows),
    }


def report(result: dict[str, Any]) -> str:
    """The tables of a run as text: tokens per second, then what the issue asks of trees and of `auto`."""
    found = result["figures"]
    sizes = sorted({row["concurrency"] for row in found["cells"]})
    by_cell = {(row["arm"], row["concurrency"]): row for row in found["cells"]}
    lines = [["tok/s (x DFLASH)", *(f"c={size}" for size in sizes), "accept", "rounds"]]
    for arm in dict.fromkeys(row["arm"] for row in found["cells"]):
        line = [arm]
        for size in sizes:
            row = by_cell.get((arm, size))
            ratio = row["to_dflash"]["median"] if row and "to_dflash" in row else 0
            line.append(f"{row['tok_s']['median']:.0f} ({ratio:.2f})" if row else "-")
        first = next(row for row in found["cells"] if row["arm"] == arm)
        counts = [by_cell[arm, size]["tok_s"]["n"] for size in sizes if (arm, size) in by_cell]
        lines.append([*line, f"{first['accept']:.2f}", f"{min(counts)}-{max(counts)}"])
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
