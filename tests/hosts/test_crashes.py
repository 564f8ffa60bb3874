# SPDX-License-Identifier: Apache-2.0
"""`kill -9` of the agent at every single step: after the next contact everything is as before or as after, never mixed.

Each crash point is a fresh copy of a small package, a process that is killed, and a recovery. The number of points is
printed at the end of each test (`pytest -s` or `-rP` shows it).
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.support.crashes import Direct, killed, steps_of
from tests.support.stages import (
    fault,
    package,
    rollback,
    sources,
)
from tests.support.trees import differences, listing

from ddtree_overlay import deploy


def count(capsys: pytest.CaptureFixture[str], points: int) -> None:
    with capsys.disabled():
        sys.stdout.write(f" [{points} crash points] ")


def test_every_step_of_an_operation(stage, capsys):
    """Killed before each step in turn, then recovered: before or after, byte for byte, with modes and times."""
    faults, seen = {}, set()
    for at in range(1, stage.steps + 1):
        stage.reset()
        assert killed(stage.work(), at)
        note = stage.contact()
        problem = fault(stage)
        if "was put back first" in note and stage.store.events()[-1]["event"] != "recovered":
            problem = problem or "the history does not tell of the recovery"
        if problem:
            faults[at] = problem
        seen.add(differences(package(stage.before), package(listing(stage.site))) == [])
    count(capsys, stage.steps)
    assert faults == {}
    # Both ends were seen, or the operation changes nothing in the package.
    assert seen == ({True} if package(stage.before) == package(stage.after) else {True, False})


def test_every_step_of_a_recovery(stage, capsys):
    """The recovery is killed before each of its own steps; the one after it finds the same tree (known states only)."""
    faults, points = {}, 0
    for first in stage.middle():
        stage.reset()
        assert killed(stage.work(), first)
        name = f"crashed-{first}"
        stage.keep(name)
        for second in range(1, len(steps_of(stage.contact)) + 1):
            stage.reset(name)
            assert killed(stage.contact, second)
            stage.contact()
            points += 1
            problem = fault(stage)
            if problem:
                faults[first, second] = problem
    count(capsys, points)
    assert faults == {}


@pytest.mark.parametrize("stage", ["push"], indirect=True)
def test_a_push_that_is_killed_before_it_did_anything_is_seen_and_tidied_up(stage):
    """Even a bare lock is told of by status, and a plain rollback takes it away."""
    for at in range(2, stage.steps, 9):
        stage.reset()
        assert killed(stage.work(), at)
        near = Direct(str(stage.site / "sglang"))
        there = (stage.site / ".ddtree-overlay").exists()
        assert ("cut off" in deploy.status(near).unfinished or "interrupted" in deploy.status(near).unfinished) == there
        if not (stage.site / ".ddtree-overlay/history.jsonl").exists():
            rollback(stage.site)
            if at < 40:
                assert not (stage.site / ".ddtree-overlay").exists()


@pytest.mark.parametrize("stage", ["push", "push over a push"], indirect=True)
def test_what_was_imported_from_a_new_folder_meanwhile_goes_with_it(stage):
    """A server imports a new module between the crash and the recovery, and leaves a folder of compiled files."""
    added = [
        n for n, (kind, path, _) in enumerate(stage.trace, 2) if kind == "rename" and path.endswith(("c.py", "d.py"))
    ]
    stage.reset()
    assert killed(stage.work(), added[-1])
    for module in (stage.site / "sglang").rglob("[cd].py"):
        cache = module.parent / "__pycache__"
        cache.mkdir(exist_ok=True)
        (cache / f"{module.stem}.cpython-398.pyc").write_bytes(b"compiled")
    assert "was put back first" in stage.contact()
    found = {k: v for k, v in package(listing(stage.site)).items() if "cpython-398" not in k}
    assert differences(package(stage.before), found) == []


def test_the_next_operation_after_a_crash_is_none_the_worse(stage, capsys):
    """Whatever was killed and wherever: the next purge plans and ends with the pristine package, not one byte more."""
    points = range(1, stage.steps + 1, 5)
    for at in points:
        stage.reset()
        assert killed(stage.work(), at)
        rollback(stage.site, purge=True)
        assert differences(package(stage.pristine), sources(listing(stage.site))) == [], at
        assert not (stage.site / ".ddtree-overlay").exists(), at
    count(capsys, len(points))


def test_everything_is_on_disk_before_what_relies_on_it(stage):
    """A power cut loses what was not fsynced: copies come before the first file, files before the history."""
    state, root = f"{stage.site}/.ddtree-overlay", f"{stage.site}/sglang"
    dirty: set[str] = set()
    for kind, path, other in stage.trace:
        if not path.startswith(str(stage.site)) or path == f"{state}/lock":
            continue
        if kind == "fsync":
            dirty.discard(path)
            continue
        if path.startswith(root):
            assert {d for d in dirty if d.startswith(state)} == set(), (kind, path)
        if path == f"{state}/history.jsonl":
            assert {d for d in dirty if d.startswith(root)} == set(), kind
        if (kind, path) == ("remove", f"{state}/journal.json"):
            assert dirty == set()
        assert other not in dirty, f"{other} is renamed before its bytes are on disk"
        dirty -= {d for d in dirty if kind in ("remove", "rmdir") and d.startswith(path)}
        if kind not in ("rename", "remove", "rmdir"):
            dirty.add(path)
        if kind in ("rename", "remove", "rmdir", "mkdir", "create"):
            dirty.add(str(Path(path).parent))
    assert len(stage.trace) > 10
