# SPDX-License-Identifier: Apache-2.0
"""What `scripts/gpu_prove` keeps when it is cut, and that what it watches with hides nothing else."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from gpu_proofs import lanes, parts
from gpu_proofs.checks import Part
from gpu_proofs.engines import SCRIPTS, Machine


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """A run with more time than any of the tests takes."""
    options = argparse.Namespace(limit=1000, at_once=1, judging=0, out=tmp_path / "out.json", cpu=True, site=tmp_path)
    machine = Machine(options, tmp_path)
    yield machine
    machine.close()


def test_every_check_is_on_disk_at_once(machine: Machine) -> None:
    """With what other parts have found so far."""
    first, second = Part(machine, "graphs"), Part(machine, "steps")
    second.facts["launches"] = 7
    for number, passed in enumerate((True, False, None), 1):
        first.check(f"check {number}", passed, "figures")
        written = json.loads(machine.options.out.read_text())
        assert written["parts"] == ["graphs", "steps"]
        assert [row["check"] for row in written["rows"]] == [f"check {at + 1}" for at in range(number)]
        assert written["facts"] == {"graphs": {}, "steps": {"launches": 7}}
    assert [row["result"] for row in written["rows"]] == ["ok", "FAILED", "not run"]


def test_a_stop_ends_what_runs(machine: Machine, tmp_path: Path) -> None:
    """A command that is no engine: it counts as not run."""
    start = time.monotonic()
    threading.Timer(1, machine.stop).start()
    code = Part(machine, "ranks").command([sys.executable, "-c", "import time; time.sleep(500)"], tmp_path / "log")
    assert code is None
    assert time.monotonic() - start < 200


def test_another_sitecustomize_has_its_turn(tmp_path: Path) -> None:
    """Python imports one of them; that of the tests' stand-ins would be left out else."""
    (tmp_path / "sitecustomize.py").write_text("print('here too', __name__)")
    paths = f"{SCRIPTS / 'gpu_watch'}:{tmp_path}"
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", ""], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "here too another sitecustomize\n"


class Written:
    """An arm with a result, or without one since the time was over."""

    def __init__(self, *texts: list[list[int]]) -> None:
        self.texts = texts

    def result(self) -> dict[str, Any] | None:
        return {"calls": [{"output_ids": ids} for ids in self.texts]} if self.texts else None


def test_page_sizes_are_compared_as_far_as_they_were_run(machine: Machine) -> None:
    """None of them, one, or several; DFLASH does not count."""
    part, text, other = Part(machine, "pages"), [[1, 2], [3]], [[1, 2], [4]]
    arms: Any = {"DFLASH": Written(text), "DDTREE 1": Written(), "DDTREE 16": Written(), "DDTREE 64": Written()}
    parts.report_pages(part, arms)
    assert part.facts == {}
    arms |= {"DDTREE 16": Written(text), "DDTREE 64": Written(other)}
    parts.report_pages(part, arms)
    assert part.facts == {"DDTREE 64: equal to DDTREE 16": [1, 2]}


@pytest.mark.parametrize(
    ("log", "result"),
    [
        ("DDTREE: 31 variants of kernels were compiled or loaded in 9.0 s.", "ok"),
        ("DDTREE: 0 variants of kernels were compiled or loaded in 0.0 s.", "FAILED"),
        ("", "FAILED"),
        ("31 variants of kernels were compiled\nDDTREE: compiling _late_kernel while serving: () {}", "FAILED"),
    ],
)
def test_a_start_that_tells_of_no_kernel_proves_nothing(machine: Machine, log: str, result: str) -> None:
    """Without a warm-up, or with a log that drops its lines, no late kernel would be seen either."""
    part = Part(machine, "lanes")
    lanes.report_compiling(part, "one lane", log)
    assert [row["result"] for row in part.rows] == [result]
    assert "overlay" in part.rows[0]["check"]
