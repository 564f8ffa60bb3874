# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/plots.py` draws whatever a run has left behind: all of it, some, nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest


sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import decode_figures
import plots


PROJECT = Path(__file__).resolve().parents[2]


def whole() -> dict[str, Any]:
    """A committed run, with a control and figures as they are made today."""
    result: dict[str, Any] = json.loads((PROJECT / "benchmarks/results/0.5.17-8b.json").read_text())
    control = [m | {"arm": "DDTREE auto, uncalibrated"} for m in result["measurements"] if m["arm"] == "DDTREE auto"]
    result["measurements"] += control
    return result | {"figures": decode_figures.figures(result)}


def cut() -> dict[str, Any]:
    """A run that was over before its second arm."""
    result = whole()
    result |= {"measurements": result["measurements"][:1], "stages": []}
    return result | {"figures": decode_figures.figures(result)}


def empty() -> dict[str, Any]:
    """A run in which no engine started."""
    result = whole()
    result |= {"measurements": [], "stages": [], "arms": [], "engines": {}, "machine": {}}
    return result | {"figures": decode_figures.figures(result)}


@pytest.mark.parametrize("result", [whole, cut, empty])
def test_three_pictures_are_drawn(tmp_path: Path, result: Any) -> None:
    """None of them without its frame."""
    file = tmp_path / "run.json"
    file.write_text(json.dumps(result()))
    plots.main([str(file)])
    for name in ("budgets", "concurrency", "stages"):
        picture = (tmp_path / f"run-{name}.png").read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len(picture) > 8000


def test_every_budget_has_a_place_and_a_name() -> None:
    """Neighbours, too; whatever a line lacks, its points lie above their names."""
    result = whole()
    figure, axes = plt.subplots()
    plots.budgets(axes, result)
    names = {place: label.get_text() for place, label in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)}
    left, right = axes.get_xlim()
    lines = [line for line in axes.get_lines() if line.get_marker() == "o"]
    plt.close(figure)
    assert left < min(names) <= max(names) < right
    assert list(names.values()) == [str(budget) for budget, _ in plots.fixed(result)]
    found = [(names[x], y) for line in lines for x, y in zip(*line.get_data(), strict=True)]
    assert sorted(found) == sorted(
        (row["arm"].removeprefix("DDTREE "), row["to_dflash"]["pooled"])
        for row in result["figures"]["cells"]
        if row["arm"].removeprefix("DDTREE ").isdecimal()
    )
