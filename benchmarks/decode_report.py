#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The tables of a run of `decode.py`; `decode_report.py RESULT.json` prints them again.

Details come first and what decides last, so that the end of a long output is what one wants to read.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parent))

import decode_figures
from decode_verdicts import give_or_take, of_all


def report(result: dict[str, Any]) -> str:
    """Everything that a run has found."""
    found = result["figures"]
    parts = [*details(result), speeds(found), counts(result), autos(found), calibrations(found)]
    return "\n".join([part for part in parts if part] + missing(result) + verdicts(found))


def details(result: dict[str, Any]) -> list[str]:
    """Stages, memory and the limits of every tree."""
    text = []
    for row in result["figures"]["stages"]:
        parts = " ".join(f"{name} {ms:.3f}" for name, ms in row["ms"].items())
        text.append(f"c={row['concurrency']} {row['arm']}: {parts} ms ({row['steps']} steps)")
    for engine, memory in result.get("memory", {}).items():
        held, kept = (memory.get(name, 0) / 2**30 for name in ("allocated", "reserved"))
        text.append(f"peak memory of {engine}: {held:.1f} GiB in tensors, {kept:.1f} GiB reserved")
    head = ["limit", "accept x", "verify ms", "limit", "possible", "got", "efficiency"]
    rows = [
        [
            f"c={row['concurrency']} {row['arm']}",
            *(f"{row[name]:.3f}" for name in ("accept_ratio", "verify_ms", "limit", "possible", "to_dflash")),
            f"{row['efficiency']:.3f}",
        ]
        for row in result["figures"]["efficiency"]
    ]
    return text + ([table([head, *rows])] if rows else [])


def speeds(found: dict[str, Any]) -> str:
    """Tokens per second of every arm at every concurrency."""
    sizes = sorted({row["concurrency"] for row in found["cells"]})
    rows_of = {(row["arm"], row["concurrency"]): row for row in found["cells"]}
    if not sizes:
        return ""
    lines = [["tok/s (x DFLASH, range)", *(f"c={size}" for size in sizes), f"accept c={sizes[0]}", "rounds"]]
    for arm in dict.fromkeys(row["arm"] for row in found["cells"]):
        mine = [rows_of.get((arm, size)) for size in sizes]
        times = [row["tok_s"]["n"] for row in mine if row]
        accept = f"{mine[0]['accept']['pooled']:.2f}" if mine[0] else "-"
        lines.append([arm, *map(cell, mine), accept, f"{min(times)}-{max(times)}"])
    return table(lines)


def counts(result: dict[str, Any]) -> str:
    """How many rounds of all arms, and behind them of contenders, each arm has; nothing where all are of the first."""
    found, asked = result["figures"]["cells"], result.get("rounds") or 0
    if not asked or all(of_all(row, asked) == row["tok_s"]["n"] for row in found):
        return ""
    sizes = sorted({row["concurrency"] for row in found})
    texts = {(r["arm"], r["concurrency"]): f"{of_all(r, asked)}+{r['tok_s']['n'] - of_all(r, asked)}" for r in found}
    lines = [["rounds of all + of contenders", *(f"c={size}" for size in sizes)]]
    lines += [
        [arm, *(texts.get((arm, size), "-").removesuffix("+0") for size in sizes)]
        for arm in dict.fromkeys(row["arm"] for row in found)
    ]
    return table(lines)


def cell(row: dict[str, Any] | None) -> str:
    """The median of tokens per second; beside DFLASH in the same rounds, over all and from least to most."""
    if row is None:
        return "-"
    times = row.get("to_dflash")
    beside = f" ({times['pooled']:.2f}, {times['min']:.2f}-{times['max']:.2f})" if times else ""
    return f"{row['tok_s']['median']:.0f}{beside}"


def autos(found: dict[str, Any]) -> str:
    """`auto` beside the others."""
    rows = [
        [
            f"c={row['concurrency']} {row['arm'].removeprefix('DDTREE ')}",
            row["best"],
            give_or_take(row, "to_best"),
            f"{row['to_best_median']:.3f}",
            str(row["to_best_rounds"]),
            give_or_take(row, "to_dflash"),
            shares(row["chosen"]),
        ]
        for row in found["auto"]
    ]
    head = ["auto", "best other arm", "auto/best", "median", "rounds", "auto/DFLASH", "chosen"]
    return table([head, *rows]) if rows else ""


def calibrations(found: dict[str, Any]) -> str:
    """Calibrated arms beside uncalibrated ones."""
    rows = [
        [
            f"c={row['concurrency']} {row['arm']}",
            *(give_or_take(row, figure) for figure in ("accept", "tok_s", "processes", "alike")),
            str(row["rounds"]),
        ]
        for row in found["calibration"]
    ]
    head = ["calibrated / uncalibrated", "accept", "tok/s", "their chains", "alike", "rounds"]
    return table([head, *rows]) if rows else ""


def missing(result: dict[str, Any]) -> list[str]:
    """What was not measured, or less often than asked."""
    asked, fewer = result.get("rounds"), {}
    for row in result["figures"]["cells"] if asked else ():
        if of_all(row, asked) < asked:
            fewer.setdefault(row["arm"], []).append(f"c={row['concurrency']} {of_all(row, asked)}")
    text = [f"fewer than {asked} rounds: {arm}: {', '.join(sizes)}" for arm, sizes in fewer.items()]
    for arm, sizes in result.get("without_graph", {}).items():
        text.append(f"not measured: {arm} at {', '.join(map(str, sizes))}: no graph of so many rows")
    text += [note if note.startswith("NOT ") else f"not measured: {note}" for note in result["dropped"]]
    return text + [f"FAILED: {failure['what']}" for failure in result.get("failed", {}).values()]


def verdicts(found: dict[str, Any]) -> list[str]:
    """What is asked of a run."""
    words = {True: "ok", False: "NOT SO", None: "open"}
    return [f"{words[row['passed']]:6}  {row['what']}: {row['figures']}" for row in found["verdicts"]]


def shares(counts: dict[str, int]) -> str:
    """The most frequent choices and how often they were taken."""
    most = sorted(counts.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{choice} {count / sum(counts.values()):.0%}" for choice, count in most)


def table(lines: list[list[str]]) -> str:
    """Aligned text; the first line is the head."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path, metavar="RESULT.json")
    given = json.loads(parser.parse_args().result.read_text())
    print(report(given | {"figures": decode_figures.figures(given)}))
