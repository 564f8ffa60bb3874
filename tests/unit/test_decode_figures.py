# SPDX-License-Identifier: Apache-2.0
"""The figures of the decoding benchmark, from steps whose answer is known."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest


sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import decode_figures


#: Two requests: a prefill, four decode steps of 10 ms, then one request alone.
STEPS: list[list[Any]] = [
    [0.00, "p", 2, 2, 0],
    [0.05, "d", 2, 6, 0],
    [0.06, "d", 2, 12, 0],
    [0.07, "d", 2, 16, 0],
    [0.08, "d", 2, 18, 1],
    [0.20, "d", 1, 12, 0],
]


def test_only_steps_between_whole_steps_count() -> None:
    """Not the first one, behind a prefill; not one that cuts a request's tokens; not those with fewer requests."""
    found = decode_figures.window(STEPS, 2)
    assert found is not None
    assert (found["tokens"], found["steps"], found["accept"]) == (10, 2, 2.5)
    assert found["tok_s"] == pytest.approx(500)
    assert found["step_ms"] == pytest.approx(10)
    assert decode_figures.window(STEPS, 3) is None


def measured(number: int, arm: str, tokens: int, step: float, size: int = 1) -> dict[str, Any]:
    """Ten steps of a round."""
    seconds = 10 * step / 1e3
    return {
        "round": number,
        "concurrency": size,
        "arm": arm,
        "tokens": tokens,
        "steps": 10,
        "seconds": seconds,
        "tok_s": tokens / seconds,
        "step_ms": step,
    }


@pytest.fixture
def result() -> dict[str, Any]:
    """Two rounds of three arms: prompts of the second round accept twice as much with both speculative ones."""
    found = []
    for number, accepted in enumerate((30, 60)):
        found += [measured(number, "plain", 10, 5.0), measured(number, "DFLASH", accepted, 10.0)]
        found += [measured(number, "DDTREE 64", 2 * accepted, 12.0), measured(number, "DDTREE auto", accepted, 8.0)]
    verify = [{"width": width, "ms": {"draft": 2.0, "verify": ms}} for width, ms in ((16, 6.0), (65, 7.0))]
    return {
        "block": 16,
        "arms": [{"name": "DDTREE 64", "engine": "ddtree", "budget": 64}],
        "measurements": found,
        "stages": [{"concurrency": 1, "arm": "DDTREE 64", "steps": verify}],
        "dropped": ["nothing"],
        "engines": {"ddtree": {"info": {"ddtree_verify_ms": {"65": {"1": 6.5}}}}},
    }


def test_an_arm_is_compared_with_the_control_of_its_own_round(result: dict[str, Any]) -> None:
    """Rounds decode different prompts, and their speeds differ more than the arms do."""
    row = next(row for row in decode_figures.cells(result["measurements"]) if row["arm"] == "DDTREE 64")
    assert row["to_dflash"] == pytest.approx({"median": 2 / 1.2, "min": 2 / 1.2, "max": 2 / 1.2, "n": 2})
    assert row["accept_ratio"] == pytest.approx(2)
    assert row["accept"] == pytest.approx(9)


def test_the_limit_is_what_the_width_of_the_verify_costs(result: dict[str, Any]) -> None:
    """DFLASH's step of 10 ms would take 11 with a verify of 65 rows; the step took 12."""
    (row,) = decode_figures.figures(result)["efficiency"]
    assert row["limit"] == pytest.approx(10 / 11)
    assert row["efficiency"] == pytest.approx(11 / 12)
    assert row["replay_ms"] == 6.5


def test_auto_is_compared_with_the_best_of_all_others(result: dict[str, Any]) -> None:
    """The best other arm is a tree; plain decoding and DFLASH are beaten."""
    (row,) = decode_figures.figures(result)["auto"]
    assert row["best"] == "DDTREE 64"
    assert row["to_best"] == pytest.approx((45 / 8) / (90 / 12))
    assert row["to_dflash"] == pytest.approx(10 / 8)


def test_the_report_names_every_arm_and_what_is_missing(result: dict[str, Any]) -> None:
    """A run that was cut says so."""
    text = decode_figures.report(result | {"figures": decode_figures.figures(result)})
    assert all(name in text for name in ("plain", "DFLASH", "DDTREE 64", "DDTREE auto", "not measured: nothing"))
