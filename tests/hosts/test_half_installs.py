# SPDX-License-Identifier: Apache-2.0
"""Installations that are not whole: an upgrade that failed or was killed, two records, linked folders."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.trees import differences, listing
from tests.support.upgrades import FILES, NEW, OLD, Case, refused

from ddtree_overlay import deploy, doctor
from ddtree_overlay.errors import ConflictError
from ddtree_overlay.remote import pushing, reading, reporting
from ddtree_overlay.remote.common import Refusal
from ddtree_overlay.snapshots import snapshot_host


def test_an_upgrade_that_fails_leaves_the_overlay_in_place(case: Case, tmp_path: Path):
    """Pip puts the old files back, patched as they were; what it forgot to take away is no concern of ours."""
    wheel = tmp_path / case.wheels[NEW].name
    data = case.wheels[NEW].read_bytes()
    wheel.write_bytes(data.replace(b"FRESH = 1\n", b"FRESH = 2\n", 1))
    assert "srt/fresh.py" in case.pip.fails("install", "--no-deps", wheel)
    assert case.status().state == "applied"
    assert case.plan(OLD).is_noop
    deploy.rollback(case.transport)
    assert {p: (case.install.root / p).read_bytes() for p in FILES[OLD]} == FILES[OLD]


def test_half_of_an_installation_is_never_patched(case: Case, tmp_path: Path):
    """At every file that pip touches: a push, old or new, is refused unless the whole release is there."""
    copies = case.pip.watched(tmp_path / "copies", tmp_path / "hooks", "install", "--no-deps", case.wheels[NEW])
    states = []
    offered = {v: case.bundle(v)[0] for v in (OLD, NEW)}
    for copy in copies:
        args = {"root": str(copy)}
        state = reporting.status(args, b"")[0]["state"]
        states.append(state)
        for version, bundle in offered.items():
            rows = [{**row, "size": 1} for row in bundle.rows()]
            try:
                plan = pushing.plan_push({**args, "candidates": [rows], "releases": [version]}, b"")[0]
            except Refusal:
                continue
            whole = all((copy / "sglang" / p).is_file() for p in FILES[version])
            todo = [a for a in plan["actions"] if a["action"] != "same"]
            conflicts = [a for a in todo if a["action"] == "conflict"]
            assert not todo or conflicts or plan["blockers"] or whole, (copy, version, state)
            if state == "half-installed":
                assert "not whole" in plan["blockers"][0]["what"]
        if state == "half-installed":
            with pytest.raises(Refusal, match="not whole"):
                reading.snapshot({**args, "wanted": [], "mention": "DFLASH"}, b"")
    assert len(copies) > 15
    assert states[0] == "applied"
    assert states[-1] == "upgraded"
    assert {"orphaned", "half-installed"} <= set(states)


def test_pip_is_killed_in_the_middle(case: Case, tmp_path: Path):
    """Every verb says so, nothing is written, and the advised command makes it whole again."""
    case.pip.killed(11, tmp_path / "hooks", "install", "--no-deps", case.wheels[NEW])
    before = listing(case.install.site)
    found = case.status()
    assert found.state == "half-installed"
    assert "its metadata is gone" in found.reason
    assert "pip has left the old files in ~glang-0.5.11.dist-info" in found.reason
    assert "-m pip uninstall -y sglang\n" in found.next_step and found.next_step == found.remedy
    for version in (OLD, NEW):
        error = refused("SGLang is not whole on this host", case.plan(version).check)
        assert isinstance(error, ConflictError)
        assert error.next_step == found.next_step
    refused("SGLang is not whole", snapshot_host, case.transport, "gpu", [])
    refused("SGLang is not whole", deploy.rollback, case.transport)
    checks = doctor.diagnose(case.transport).checks
    assert any(c.level == "error" and "not whole" in c.message for c in checks)
    assert differences(before, listing(case.install.site)) == []

    case.pip("uninstall", "-y", "sglang")
    case.pip("install", "--no-deps", "--ignore-installed", case.wheels[NEW])
    assert (case.status().state, case.status().remedy) == ("upgraded", "")
    case.push(NEW)
    assert (case.status().state, case.status().remedy) == ("applied", "")
    deploy.rollback(case.transport, purge=True)
    assert (case.status().state, case.status().remedy) == ("pristine", ""), "a healthy server is not to be reinstalled"


def test_linked_folders_are_looked_into_once(case: Case):
    """Modules behind a link count; a link to a folder above itself has an end."""
    (case.install.root / "srt/loop").symlink_to("..")
    away = case.install.site / "elsewhere"
    (case.install.root / "srt/speculative").rename(away)
    (case.install.root / "srt/speculative").symlink_to(away)
    assert case.status().state == "applied"


def test_an_installation_that_was_never_finished(case: Case):
    """Every file is there, and RECORD, which comes last, is not; another distribution of a like name has its own."""
    case.upgrade()
    (case.install.site / "sglang-router-0.1.0.dist-info").mkdir()
    assert case.status().state == "upgraded"
    (case.install.site / f"sglang-{NEW}.dist-info/RECORD").unlink()
    found = case.status()
    assert (found.state, "has no RECORD" in found.reason) == ("half-installed", True)
    refused("its installation was never finished", case.plan(NEW).check)


def test_two_records_of_one_package(case: Case):
    """`--ignore-installed` leaves both: which files are whose cannot be known."""
    case.pip("install", "--no-deps", "--ignore-installed", case.wheels[NEW])
    assert "two versions are recorded as installed" in case.status().reason
    refused("0.5.11 and 0.5.12", case.plan(NEW).check)


def test_files_that_were_copied_over_half(case: Case):
    """Those that the overlay touches are of the new release, others are as well, and the metadata is the old one's."""
    deploy.rollback(case.transport, purge=True)
    for path in ("srt/a.py", "srt/b.py"):
        (case.install.root / path).unlink()
        (case.install.root / path).write_bytes(FILES[NEW][path])
    error = refused("its metadata says 0.5.11", case.plan(NEW).check)
    assert "srt/b.py" in error.what
