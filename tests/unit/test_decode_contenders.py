# SPDX-License-Identifier: Apache-2.0
"""Who is in the rounds of the decoding benchmark that are about the best arm, and what the figures say of doubt."""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest


sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import decode_contenders
import decode_figures
import decode_report
from decode_arms import Arm


def measured(number: int, arm: str, speed: float, size: int = 1) -> dict[str, Any]:
    """A round in which an arm has so many tokens per second."""
    steps = {"steps": 20.0, "reached": 1.0, "span_seconds": 0.2, "span_steps": 20}
    found = {"tokens": 60, "seconds": size * 60 / speed, **steps}
    return {"round": number, "concurrency": size, "arm": arm, **(decode_figures.together([found], size) or {})}


def contenders(speeds: dict[str, list[float]], *, controlled: bool = False, size: int = 1) -> list[str]:
    """Of arms with speeds by round."""
    found = [measured(at, arm, speed, size) for arm, each in speeds.items() for at, speed in enumerate(each)]
    cells = [(size, Arm(arm, "any")) for arm in speeds]
    chosen = decode_contenders.contenders(cells, found, controlled=controlled)
    return [arm.name for arm in chosen.get(size, [])]


def test_what_is_near_the_best_other_arm_stays() -> None:
    """`auto` does in any case; the others by the best of them, and not by `auto`."""
    speeds = {"plain": [40.0], "DFLASH": [50.0], "DDTREE auto": [130.0]}
    speeds |= {"DDTREE 8": [92.0], "DDTREE 16": [94.0], "DDTREE 32": [100.0]}
    assert contenders(speeds) == ["DDTREE auto", "DDTREE 16", "DDTREE 32"]
    assert contenders(speeds | {"plain": [99.0]})[0] == "plain"


def test_what_is_surely_behind_the_best_goes() -> None:
    """By its own standard errors: what differs by the same 4 % in every round goes, what may be better stays."""
    speeds = {"DDTREE auto": [100.0] * 4, "DDTREE 16": [100.0, 101, 99, 100], "DDTREE 32": [96.0, 96, 96.5, 95.5]}
    assert contenders(speeds | {"DDTREE 64": [90.0, 102, 88, 104]}) == ["DDTREE auto", "DDTREE 16", "DDTREE 64"]


def test_rounds_that_an_arm_lacks_are_not_held_against_it() -> None:
    """The second round's prompts are slow for all: by its own round alone, the last arm is as good as the best."""
    speeds = {"DDTREE auto": [100.0, 50.0], "DDTREE 8": [100.0, 50.0], "DDTREE 64": [99.0]}
    assert contenders(speeds) == list(speeds)


def test_without_auto_there_are_no_contenders() -> None:
    """Nothing is held against the best there."""
    assert contenders({"DFLASH": [50.0], "DDTREE 16": [60.0]}) == []


def test_beside_a_control_each_engine_has_its_best_and_both_the_same_arms() -> None:
    """And the chains; what only one of them has stays alone."""
    speeds = {"DFLASH": 50.0, "DDTREE auto": 100.0, "DDTREE chain": 60.0, "DDTREE 15": 80.0, "DDTREE 64": 100.0}
    speeds |= {"DDTREE 128": 99.0, "DDTREE auto, uncalibrated": 90.0, "DDTREE chain, uncalibrated": 60.0}
    speeds |= {"DDTREE 15, uncalibrated": 90.0, "DDTREE 64, uncalibrated": 80.0}
    assert contenders({arm: [speed] for arm, speed in speeds.items()}, controlled=True) == list(speeds)
    speeds["DDTREE 15, uncalibrated"] = 70.0
    assert set(speeds) - set(contenders({arm: [speed] for arm, speed in speeds.items()}, controlled=True)) == {
        "DDTREE 15",
        "DDTREE 15, uncalibrated",
    }


def test_where_least_is_known_comes_first() -> None:
    """Any round may be the last; one measurement alone knows nothing."""
    arms, found = ("DFLASH", "DDTREE auto", "DDTREE 64"), []
    for size, several in ((1, (100, 98)), (4, (100, 60)), (16, (100,)), (32, (100, 80))):
        found += [measured(at, arm, speed, size) for arm in arms[:2] for at, speed in enumerate(several)]
        found += [measured(at, arms[2], 100, size) for at in range(len(several))]
    cells = [(size, Arm(arm, "any")) for size in (1, 4, 16, 32) for arm in arms]
    assert list(decode_contenders.contenders(cells, found, controlled=False)) == [16, 4, 32, 1]


def test_rows_are_by_concurrency_whichever_was_measured_first() -> None:
    """A first round may lack a cell."""
    found = [measured(at, arm, 100, size) for at, size in enumerate((48, 1, 16)) for arm in ("DFLASH", "DDTREE auto")]
    assert [row["concurrency"] for row in decode_figures.autos(found)] == [1, 16, 48]


def test_a_ratio_has_the_standard_error_of_its_rounds() -> None:
    """Of the logarithm of the ratio in a round, times the ratio; from one round there is none."""
    speeds = {"DDTREE auto": [90.0, 100.0, 110.0], "DDTREE 64": [100.0] * 3, "DFLASH": [50.0, 60.0, 70.0]}
    found = [measured(at, arm, speed) for arm, each in speeds.items() for at, speed in enumerate(each)]
    (row,) = decode_figures.autos(found)
    logs = [math.log(ratio) for ratio in (0.9, 1.0, 1.1)]
    assert row["best"] == "DDTREE 64"
    assert row["to_best_error"] == pytest.approx(row["to_best"] * statistics.stdev(logs) / math.sqrt(3))
    assert (row["to_best_median"], row["to_best_rounds"]) == (pytest.approx(1), 3)
    logs = [math.log(ratio) for ratio in (90 / 50, 100 / 60, 110 / 70)]
    assert row["to_dflash_error"] == pytest.approx(row["to_dflash"] * statistics.stdev(logs) / math.sqrt(3))
    (row,) = decode_figures.autos([entry for entry in found if entry["round"] == 0])
    assert (row["to_best_error"], row["to_best_rounds"]) == (None, 1)


def test_the_error_of_calibration_leaves_out_what_both_engines_share() -> None:
    """Engines differ by a tenth more in every other round, chains too: `alike` knows its ratio better than tok_s."""
    found = []
    for at in range(4):
        for arm, gain in (("DDTREE chain", 1.0), ("DDTREE auto", 1.05)):
            found += [measured(at, arm, 100 * gain * (1.1 if at % 2 else 1)), measured(at, f"{arm}, uncalibrated", 100)]
    (row,) = decode_figures.calibrations(found)
    assert row["alike"] == pytest.approx(1.05, rel=1e-3)
    assert row["alike_error"] == pytest.approx(0, abs=1e-9)
    assert row["tok_s_error"] > 0.02
    assert (row["rounds"], row["accept_error"]) == (4, 0)
    text = decode_report.calibrations({"calibration": [row]})
    assert "1.050 ± 0.000" in text
    assert f"{row['tok_s']:.3f} ± {row['tok_s_error']:.3f}" in text


def test_report_and_verdict_show_the_doubt() -> None:
    """What passes or fails is the figure itself."""
    speeds = {"DFLASH": [60.0, 60.0], "DDTREE auto": [96.0, 99.0], "DDTREE 64": [100.0, 100.0]}
    found = [measured(at, arm, speed) for arm, each in speeds.items() for at, speed in enumerate(each)]
    result = {"block": 16, "arms": [], "measurements": found, "stages": [], "engines": {}, "dropped": [], "rounds": 2}
    result |= {"figures": decode_figures.figures(result)}
    first, second, *_ = result["figures"]["verdicts"]
    assert first["figures"] == "least 0.975 ± 0.015 at concurrency 1, of 1 concurrencies"
    assert (first["passed"], second["figures"].startswith("least 1.625 ± 0.025")) == (True, True)
    assert "0.975 ± 0.015" in decode_report.autos(result["figures"])
