# SPDX-License-Identifier: Apache-2.0
"""What a run has shown, as Markdown that is small enough to be committed: no figure of a result is written by hand.

A run is read from the JSON of `gpu_prove` or of `benchmarks/kernel_times.py`, or from the output of a `gpu_prove` that
was ended before its table: its lines of progress hold every check.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any


#: Lines of progress, by what stands behind the seconds: a check, an engine of a part, or something worth knowing.
CHECK = re.compile(r" *\d+ s  (ok|FAILED|not run) +(\w+): (.*)")
ENGINE = re.compile(r" *\d+ s  engine (\w+)-")
NOTE = re.compile(r" *\d+ s  {9,10}(\S.*|  .*)")
#: The first words of the line above the final table.
END = re.compile(r"gpu_prove [\w ]+, budget \d+: \d+ s")


def read(file: Path) -> dict[str, Any]:
    """A run from a file of any of the three kinds."""
    text = file.read_text("utf-8")
    return json.loads(text) if text.lstrip().startswith("{") else from_log(text)


def from_log(text: str) -> dict[str, Any]:
    """What the lines of progress say; a check's name and its figures stay in one piece, since both hold colons."""
    rows, notes, parts = [], [], []
    for line in text.splitlines():
        if found := CHECK.fullmatch(line):
            rows.append({"part": found[2], "check": found[3], "result": found[1], "figures": ""})
            parts.append(found[2])
        elif found := ENGINE.match(line):
            parts.append(found[1])
        elif found := NOTE.fullmatch(line):
            notes.append(found[1])
    cut = not any(END.fullmatch(line) for line in text.splitlines())
    return {"parts": list(dict.fromkeys(parts)), "rows": rows, "facts": {}, "notes": notes, "cut": cut}


def markdown(run: dict[str, Any], title: str, about: list[str]) -> str:
    """The page of a run: what it was, its tables, and what it did not come to."""
    lines = [f"# {title}", ""]
    lines += [f"- {text}" for text in [*(f"{name}: {value}" for name, value in run.get("about", {}).items()), *about]]
    if "rounds" in run:
        lines += [
            f"- {run['machine']}, {run['date']}; microseconds",
            "",
            "## Tree, mask, accept",
            *table(ascending(run["rounds"])),
        ]
        lines += ["", "## Head, without its matrix product", *table(ascending(run["heads"]))]
        return "\n".join(lines) + "\n"
    lines += [f"- {outcome(run)}"]
    order = {name: at for at, name in enumerate(run["parts"])}
    checks = sorted(run["rows"], key=lambda row: order[row["part"]])
    cells = [
        {
            "part": row["part"],
            "result": row["result"],
            "check": ": ".join(filter(None, (row["check"], row["figures"]))),
        }
        for row in checks
    ]
    lines += ["", "## Checks", *table(cells)] if cells else []
    for part, facts in run["facts"].items():
        for name, value in facts.items():
            if not name.startswith("steps"):  # a record of every step, which checks sum up
                lines += ["", f"## {part}: {name}", *table(fact(name, value))]
    if run.get("notes"):
        lines += ["", "## Also printed", "", "```text", *run["notes"], "```"]
    return "\n".join(lines) + "\n"


def outcome(run: dict[str, Any]) -> str:
    """How many checks passed, and which parts have none."""
    counts = Counter(row["result"] for row in run["rows"])
    said = ", ".join(f"{count} {result}" for result, count in counts.items()) or "no check"
    if run.get("cut"):
        said = f"ended from outside after {len(run['rows'])} checks: {said}"
    missing = [part for part in run["parts"] if not any(row["part"] == part for row in run["rows"])]
    return f"{said}; no check of {', '.join(missing)}" if missing else said


def fact(name: str, value: Any) -> list[dict[str, Any]]:
    """A fact of a part as rows; of gaps, how many were ties."""
    if name == "gaps":
        return [
            {
                "arm": arm,
                "outputs that part": len(gaps),
                "at a tie": gaps.count(0.0),
                "largest gap": max(gaps, default=0),
            }
            for arm, gaps in value.items()
        ]
    if isinstance(value, list) and all(isinstance(each, dict) for each in value):
        return value
    if isinstance(value, dict) and not any(isinstance(each, dict | list) for each in value.values()):
        return [value]
    return [{"value": ", ".join(map(cell, value)) if isinstance(value, list) else json.dumps(value)}]


def ascending(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Times by budget, or by k, and batch; they are taken in the order of what matters most."""
    return sorted(rows, key=lambda row: (row.get("budget", row.get("k")), row["batch"]))


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Rows with the same keys as a Markdown table, an empty line before it."""
    if not any(rows):
        return ["", "None."]
    lines = ["", f"| {' | '.join(rows[0])} |", f"|{'---|' * len(rows[0])}"]
    return lines + [f"| {' | '.join(cell(value) for value in row.values())} |" for row in rows]


def cell(value: Any) -> str:
    """A number as wide as it has to be."""
    if isinstance(value, float):
        return f"{value:.1f}" if abs(value) >= 5 else f"{value:.4g}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def command_of(words: list[str], names: dict[str, Path | None]) -> str:
    """A command line as anybody could repeat it: `SITE` for the site's folder, whichever it was."""
    known = {path: name for name, path in names.items() if path}
    return shlex.join([known.get(Path(word), word) for word in words])
