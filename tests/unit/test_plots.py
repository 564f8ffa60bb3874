# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/plots.py` draws whatever a run has left behind: all of it, some, nothing."""

from __future__ import annotations

import itertools
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


def test_every_budget_has_a_place_of_its_own_between_the_edges() -> None:
    """0, which drafts nothing, too: it has no logarithm."""
    figure, axes = plt.subplots()
    plots.budgets(axes, whole())
    left, right = (edge for edge in axes.transData.inverted().transform(axes.bbox)[:, 0])
    places = axes.transData.transform([(tick, 1.0) for tick in axes.get_xticks()])[:, 0]
    plt.close(figure)
    assert len(places) == 11
    assert all(b - a > (places[-1] - places[0]) / 120 for a, b in itertools.pairwise(places))
    assert 0 < left < right


def test_names_of_budgets_do_not_lie_on_each_other() -> None:
    """15 and 16 are nearly one place."""
    assert plots.names_of([2, 8, 15, 16, 32]) == ["2", "8", "15", "", "32"]
