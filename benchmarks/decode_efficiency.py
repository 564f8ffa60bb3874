# SPDX-License-Identifier: Apache-2.0
"""What the width of a verify leaves of DFLASH's speed (`decode_figures.DEFINITIONS`), and how much of it arrives."""

from __future__ import annotations

import statistics
from typing import Any


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


def verify_ms(stages: list[dict[str, Any]], concurrency: int) -> dict[int, float]:
    """The target's forward by its width, milliseconds: medians of the steps that were timed."""
    times: dict[int, list[float]] = {}
    for entry in stages:
        if entry["concurrency"] == concurrency:
            for step in entry["steps"]:
                if "verify" in step["ms"] and step.get("width"):
                    times.setdefault(int(step["width"]), []).append(step["ms"]["verify"])
    return {width: statistics.median(found) for width, found in sorted(times.items())}


def replays(result: dict[str, Any], concurrency: int) -> dict[int, float]:
    """Milliseconds of a verify graph replayed alone at start-up, by width, where the servers report them."""
    found: dict[int, float] = {}
    for engine in result["engines"].values():
        for width, times in (engine["info"].get("ddtree_verify_ms") or {}).items():
            if str(concurrency) in times:
                found[int(width)] = times[str(concurrency)]
    return found
