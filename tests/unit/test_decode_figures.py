# SPDX-License-Identifier: Apache-2.0
"""The figures of the decoding benchmark, from steps whose answer is known."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest


sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import decode_figures
import decode_report


#: Two requests, one of which gets two tokens a step and the other four; then one is cut, and the other is alone.
STEPS: list[list[Any]] = [
    [0.00, "p", [1, 1], 0],
    [0.05, "d", [3, 5], 0],
    [0.06, "d", [5, 9], 0],
    [0.07, "d", [7, 13], 0],
    [0.08, "d", [9, 17], 0],
    [0.09, "d", [10, 18], 1],
    [0.20, "d", [12], 0],
]


def test_requests_count_by_the_time_they_take_for_their_tokens() -> None:
    """Six tokens take three steps and one and a half: c x N over the mean time, not the tokens of all steps."""
    part = decode_figures.window(STEPS, 2, 6)
    assert part is not None
    found = decode_figures.together([part], 2)
    assert found is not None
    assert found["seconds"] == pytest.approx((0.03 + 0.015) / 2)
    assert found["tok_s"] == pytest.approx(12 / 0.0225)
    assert found["accept"] == pytest.approx(6 / 2.25)
    assert (found["step_ms"], found["reached"]) == (pytest.approx(10), 1)


def test_a_request_that_is_cut_counts_with_its_speed_so_far() -> None:
    """Twelve tokens: one request gets there in three steps, the other would in six."""
    part = decode_figures.window(STEPS, 2, 12)
    assert part is not None
    assert (part["steps"], part["reached"]) == (pytest.approx(4.5), 0.5)
    assert part["seconds"] == pytest.approx(0.045)


def test_steps_without_all_requests_do_not_count() -> None:
    """No step held three; and of two windows the times add up."""
    assert decode_figures.window(STEPS, 3, 6) is None
    part = decode_figures.window(STEPS, 2, 6)
    assert part is not None
    twice = decode_figures.together([part, part], 2)
    assert twice is not None
    assert twice["tok_s"] == pytest.approx(12 / 0.0225)
    assert twice["tokens"] == 12


def measured(number: int, arm: str, accepted: float, step: float) -> dict[str, Any]:
    """One request that gets its 60 tokens with so many a step, and steps of so many milliseconds."""
    steps = 60 / accepted
    spans = {"span_seconds": steps * step / 1e3, "span_steps": steps}
    found = {"tokens": 60, "seconds": steps * step / 1e3, "steps": steps, "reached": 1.0, **spans}
    return {"round": number, "concurrency": 1, "arm": arm, **(decode_figures.together([found], 1) or {})}


@pytest.fixture
def result() -> dict[str, Any]:
    """Two rounds of four arms: prompts of the second round accept twice as much with all speculative ones."""
    found = []
    for number, accepted in enumerate((3, 6)):
        found += [measured(number, "plain", 1, 5.0), measured(number, "DFLASH", accepted, 10.0)]
        found += [measured(number, "DDTREE 64", 2 * accepted, 12.0), measured(number, "DDTREE auto", accepted, 8.0)]
    verify = [{"width": width, "ms": {"draft": 2.0, "verify": ms}} for width, ms in ((16, 6.0), (65, 7.0))]
    return {
        "block": 16,
        "arms": [{"name": "DDTREE 64", "engine": "ddtree", "budget": 64}],
        "measurements": found,
        "stages": [{"concurrency": 1, "arm": "DDTREE 64", "steps": verify}],
        "dropped": ["nothing"],
        "engines": {"ddtree": {"info": {"ddtree_verify_ms": {"65": {"1": 6.5}}}}},
        "memory": {"ddtree": {"allocated": 2**31, "reserved": 2**32}},
    }


def test_an_arm_is_compared_with_the_control_of_its_own_rounds(result: dict[str, Any]) -> None:
    """Rounds decode different prompts, and their speeds differ more than the arms do."""
    cut = [m for m in result["measurements"] if (m["round"], m["arm"]) != (1, "DDTREE 64")]
    for measurements, rounds in ((result["measurements"], 2), (cut, 1)):
        row = next(row for row in decode_figures.cells(measurements) if row["arm"] == "DDTREE 64")
        same = dict.fromkeys(("median", "min", "max", "pooled"), 2 / 1.2)
        assert row["to_dflash"] == pytest.approx(same | {"n": rounds})
        assert row["accept_ratio"] == pytest.approx(2)


def test_rounds_are_pooled_by_their_tokens(result: dict[str, Any]) -> None:
    """3 and 6 accepted a step: 120 tokens in 30 steps."""
    row = next(row for row in decode_figures.cells(result["measurements"]) if row["arm"] == "DFLASH")
    assert row["accept"]["pooled"] == pytest.approx(4)
    assert row["tok_s"]["pooled"] == pytest.approx(400)
    assert row["tok_s"]["median"] == pytest.approx(450)


def test_the_limit_is_what_the_width_of_the_verify_costs(result: dict[str, Any]) -> None:
    """DFLASH's step of 10 ms would take 11 with a verify of 65 rows; the step took 12."""
    (row,) = decode_figures.figures(result)["efficiency"]
    assert row["limit"] == pytest.approx(10 / 11)
    assert row["efficiency"] == pytest.approx(11 / 12)
    assert (row["measured_by"], row["verify_stage_ms"]) == ("stage", 7.0)
    result["engines"]["ddtree"]["info"]["ddtree_verify_ms"]["16"] = {"1": 6.0}
    (row,) = decode_figures.figures(result)["efficiency"]
    assert (row["measured_by"], row["limit"]) == ("replay", pytest.approx(10 / 10.5))


def test_auto_is_compared_with_the_best_of_all_others(result: dict[str, Any]) -> None:
    """The best other arm is a tree; plain decoding and DFLASH are beaten."""
    (row,) = decode_figures.figures(result)["auto"]
    assert row["best"] == "DDTREE 64"
    assert row["to_best"] == pytest.approx(12 / 8 / 2)
    assert row["to_dflash"] == pytest.approx(10 / 8)


def test_the_report_names_every_arm_and_what_is_missing(result: dict[str, Any]) -> None:
    """A run that was cut says so."""
    text = decode_report.report(result | {"figures": decode_figures.figures(result)})
    assert all(
        name in text for name in ("plain", "DFLASH", "DDTREE 64", "DDTREE auto", "2.0 GiB", "not measured: nothing")
    )


def test_calibrated_arms_are_compared_in_the_same_rounds_and_by_their_chains() -> None:
    """The control's process is a tenth faster, as its chain shows; what is left is the calibration."""
    found = []
    for number, accepted in enumerate((3, 4)):
        for name, gain, step in (("DDTREE chain", 1.0, 10.0), ("DDTREE auto", 1.32, 11.0), ("DDTREE 64", 1.4, 12.0)):
            found.append(measured(number, name, gain * accepted, step))
            found.append(measured(number, f"{name}, uncalibrated", gain * accepted / 1.1, step / 1.1))
        found[6 * number + 1] = measured(number, "DDTREE chain, uncalibrated", accepted, 10.0 / 1.1)
    rows = {row["arm"]: row for row in decode_figures.calibrations(found)}
    assert set(rows) == {"DDTREE auto", "DDTREE 64"}
    for row in rows.values():
        expected = {"tok_s": 1.0, "accept": 1.1, "processes": 1 / 1.1, "alike": 1.1}
        assert {name: row[name] for name in expected} == pytest.approx(expected)
    autos = {row["arm"]: row["best"] for row in decode_figures.autos(found)}
    assert autos == {"DDTREE auto": "DDTREE 64", "DDTREE auto, uncalibrated": "DDTREE 64, uncalibrated"}


def test_verdicts_are_about_the_worst_concurrency(result: dict[str, Any]) -> None:
    """Of `auto` over the best and over DFLASH; efficiency and gain at concurrency 1; rounds."""
    result["rounds"] = 2
    found = {row["what"]: row["passed"] for row in decode_figures.figures(result)["verdicts"]}
    assert found == {
        "DDTREE auto is at least 0.97 x the best other arm": False,
        "DDTREE auto is at least 1.05 x DFLASH": True,
        "efficiency at concurrency 1 is at least 0.95": False,
        "a tree is at least 1.24 x DFLASH at concurrency 1, where possible": True,
        "every arm has all rounds": True,
    }
    result["rounds"] = 3
    assert decode_figures.figures(result)["verdicts"][-1]["passed"] is False


def test_what_decides_stands_at_the_end(result: dict[str, Any]) -> None:
    """A log that is cut at its front still says it."""
    text = decode_report.report(result | {"rounds": 2, "figures": decode_figures.figures(result | {"rounds": 2})})
    lines = text.splitlines()
    assert lines[-1].startswith("ok      every arm has all rounds")
    order = ["peak memory", "limit  ", "tok/s (x DFLASH", "auto  ", "not measured", "NOT SO"]
    places = [next(at for at, line in enumerate(lines) if line.startswith(word)) for word in order]
    assert places == sorted(places)
