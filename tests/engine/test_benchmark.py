# SPDX-License-Identifier: Apache-2.0
"""benchmarks/decode.py with real engines on the CPU: every arm, stages, choices and figures of a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.engine import harness
from tests.engine.engines import Sites


def test_a_run_measures_every_arm_and_says_what_they_did(sites: Sites, tmp_path: Path) -> None:
    """With a control without calibration, on the release that schedules ahead."""
    out, site = tmp_path / "run.json", sites[harness.SECOND_RELEASE]
    command = [sys.executable, harness.PROJECT / "benchmarks/decode.py", "--cpu", "--patched", "--site", site]
    command += ["--pair", harness.PAIR, "--python", harness.python_of(site), "--out", out]
    # A measurement ends with its tokens, long before that on most machines.
    command += ["--limit", "3000", "--start-limit", "1200", "--seconds", "60", "--stage-seconds", "30"]
    command += ["--concurrency", "1,3", "--rounds", "1", "--tokens", "10", "--prompt-tokens", "24"]
    command += ["--singles", "2", "--settle", "0.5", "--budgets", "4", "--more", "", "--without-calibration"]
    command += ["--contenders", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3200, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads(out.read_text())
    kinds = ("DFLASH", "DDTREE auto", "DDTREE chain", "DDTREE 4", "DDTREE 7")
    names = {"plain", *kinds, *(f"{kind}, uncalibrated" for kind in kinds[1:] if kind != "DDTREE 4")}
    assert {(row["arm"], row["concurrency"]) for row in result["figures"]["cells"]} == {
        (name, size) for name in names for size in (1, 3)
    }
    accept = {row["arm"]: row["accept"]["pooled"] for row in result["figures"]["cells"] if row["concurrency"] == 1}
    assert accept["plain"] == 1 < accept["DDTREE 4"]
    assert {row["arm"] for row in result["figures"]["calibration"]} == {"DDTREE auto", "DDTREE 7"}
    calibration = {
        name: engine["info"].get("speculative_ddtree_calibration") for name, engine in result["engines"].items()
    }
    assert (calibration["ddtree"], calibration["uncalibrated"]) == ("auto", "off")
    for row in result["figures"]["stages"]:
        assert {"draft", "verify", "rest"} <= row["ms"].keys()
    assert {(row["arm"], row["concurrency"]) for row in result["figures"]["stages"]} == {
        (name, size) for name in kinds for size in (1, 3)
    }
    assert all(row["chosen"] for row in result["figures"]["auto"])
    notes = [note["contenders"] for note in result["plan"] if "contenders" in note]
    assert sorted(size for note in notes for size in note) == ["1", "3"]
    for names in (names for note in notes for names in note.values()):
        assert {"DFLASH", "DDTREE auto", "DDTREE chain", "DDTREE auto, uncalibrated"} <= set(names)
    assert {row["to_best_rounds"] for row in result["figures"]["auto"]} <= {1, 2}
    assert (tmp_path / "run-logs/ddtree.log").read_text().count("DDTREE") > 3
    if "pinning" in result:  # what the kernel says of every thread, on a machine with more than one core
        plan, found = (result["pinning"][key] for key in ("plan", "found"))
        for engine in ("plain", "dflash", "ddtree", "uncalibrated"):
            assert found[engine] == {role: [plan[role]] for role in ("client", "scheduler", "detokenizer")}
        assert not set(plan["scheduler"]) & {*plan["client"], *plan["detokenizer"], *plan["benchmark"]}
    else:
        assert "NOT PINNED" in done.stdout
    assert "auto/DFLASH" in done.stdout.split("not measured")[0]
