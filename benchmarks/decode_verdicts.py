# SPDX-License-Identifier: Apache-2.0
"""What is asked of a run of `decode.py`, and whether its figures say so."""

from __future__ import annotations

from typing import Any

from decode_arms import UNCALIBRATED


#: What a run is to show: of `auto` over the best other arm and over DFLASH, of a tree at concurrency 1.
TO_BEST, TO_DFLASH, EFFICIENCY, GAIN = 0.97, 1.05, 0.95, 1.24


def verdicts(result: dict[str, Any], found: dict[str, Any]) -> list[dict[str, Any]]:
    """What is asked of a run, and whether it is so; None where nothing was measured that says it."""
    rows = []
    for name in dict.fromkeys(row["arm"] for row in found["auto"]):
        mine = [row for row in found["auto"] if row["arm"] == name]
        for figure, bound, what in (("to_best", TO_BEST, "the best other arm"), ("to_dflash", TO_DFLASH, "DFLASH")):
            known = [row for row in mine if row[figure] is not None]
            if known:
                least = min(known, key=lambda row: row[figure])
                text = f"least {give_or_take(least, figure)} at concurrency {least['concurrency']}"
                text += f", of {len(known)} concurrencies"
                rows.append(verdict(f"{name} is at least {bound} x {what}", least[figure] >= bound, text))
    single = [row for row in found["efficiency"] if row["concurrency"] == 1 and not row["arm"].endswith(UNCALIBRATED)]
    if single:
        best = max(single, key=lambda row: row["to_dflash"])
        text = f"{best['efficiency']:.3f} of what accept length and verify width allow, with {best['arm']}"
        rows.append(
            verdict(f"efficiency at concurrency 1 is at least {EFFICIENCY}", best["efficiency"] >= EFFICIENCY, text)
        )
        possible = max(row["possible"] for row in single)
        text = f"{best['to_dflash']:.3f} with {best['arm']}; possible are {possible:.3f}"
        passed = best["to_dflash"] >= GAIN if possible >= GAIN else None
        rows.append(verdict(f"a tree is at least {GAIN} x DFLASH at concurrency 1, where possible", passed, text))
    asked = result.get("rounds")
    if asked and found["cells"]:
        short = [row for row in found["cells"] if of_all(row, asked) < asked]
        text = f"{len(found['cells']) - len(short)} of {len(found['cells'])} cells have all {asked}"
        rows.append(verdict("every arm has all rounds", not short, text))
    return rows


def of_all(row: dict[str, Any], asked: int) -> int:
    """How many of the rounds of all arms a cell has; those of contenders have the numbers behind them."""
    return sum(number < asked for number in row["rounds"])


def give_or_take(row: dict[str, Any], figure: str) -> str:
    """A ratio with its standard error, where there is one."""
    if row[figure] is None:
        return "-"
    error = row.get(f"{figure}_error")
    return f"{row[figure]:.3f}" + ("" if error is None else f" ± {error:.3f}")


def verdict(what: str, passed: bool | None, text: str) -> dict[str, Any]:
    """One of them."""
    return {"what": what, "passed": passed, "figures": text}
