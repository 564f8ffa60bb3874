# SPDX-License-Identifier: Apache-2.0
"""Stage times: what a step's line says, and that nothing is written when nobody asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sglang.srt.speculative.ddtree import moments, stages
from sglang.srt.speculative.ddtree.stages import DRAFT, REST, TREE, VERIFY, StageTimer
from tests.overlay.host_clock import HostClock


def steps(target: Path) -> list[dict]:
    return [json.loads(line) for line in target.read_text().splitlines()] if target.exists() else []


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> HostClock:
    """By which moments are taken."""
    clock = HostClock()
    monkeypatch.setattr(moments, "time", clock)
    return clock


def run_step(timer: StageTimer, **facts: object) -> None:
    timer.mark(DRAFT, facts)
    timer.mark(TREE, {})
    timer.mark(VERIFY, {"width": 9})
    moments.time.sleep(0.02)
    timer.mark(REST, {})


def test_a_step_is_split_from_its_begin_to_the_begin_of_the_next(tmp_path: Path, clock: HostClock) -> None:
    """The stages add up to the time from step to step, the pause of the scheduler included."""
    (tmp_path / "stages.on").touch()
    timer = StageTimer(str(tmp_path / "stages"))
    run_step(timer, batch=3)
    clock.sleep(0.03)
    run_step(timer, batch=2)
    (first,) = steps(tmp_path / "stages")
    assert (first["batch"], first["width"], list(first["ms"])) == (3, 9, [DRAFT, TREE, VERIFY, REST])
    assert first["ms"][VERIFY] == pytest.approx(20, abs=0.1)
    assert first["ms"][REST] == pytest.approx(30, abs=0.1)
    assert sum(first["ms"].values()) == pytest.approx(50, abs=0.1)


def test_a_prefill_between_two_steps_is_not_counted_as_the_rest_of_the_first(tmp_path: Path) -> None:
    """An interrupted step is not written at all."""
    (tmp_path / "stages.on").touch()
    timer = StageTimer(str(tmp_path / "stages"))
    run_step(timer, batch=1)
    timer.interrupt()
    run_step(timer, batch=2)
    timer.mark(DRAFT, {"batch": 3})
    assert [step["batch"] for step in steps(tmp_path / "stages")] == [2]


def test_steps_are_timed_only_while_the_switch_is_there(tmp_path: Path) -> None:
    """One engine runs with and without timing."""
    timer = StageTimer(str(tmp_path / "stages"))
    run_step(timer, batch=1)
    (tmp_path / "stages.on").touch()
    run_step(timer, batch=2)
    (tmp_path / "stages.on").unlink()
    run_step(timer, batch=3)
    run_step(timer, batch=4)
    assert [step["batch"] for step in steps(tmp_path / "stages")] == [2]


def test_a_mark_does_nothing_where_no_file_was_named(tmp_path: Path) -> None:
    """The variable is not set in this process."""
    assert stages._timer is None
    stages.mark(DRAFT, batch=1)
    stages.interrupt()
    assert not list(tmp_path.iterdir())
