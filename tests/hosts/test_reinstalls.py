# SPDX-License-Identifier: Apache-2.0
"""Somebody installs the same SGLang again under the overlay, another build of it, or takes it away."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.agents import sabotaged
from tests.support.installs import bundle_for
from tests.support.packages import build_wheel
from tests.support.trees import differences, listing
from tests.support.upgrades import FILES, FIRST, NAMES, NEW, OLD, TREE, Case, refused

from ddtree_overlay import deploy
from ddtree_overlay.errors import OverlayError


ASKED = {"operator": "ann@desk", "lock_wait": 0, "note": ""}


def test_a_reinstall_of_the_same_release(case: Case):
    """Told from an edit by hand; a push mends it, and one step back is the base, not the same overlay again."""
    case.upgrade(OLD, "--reinstall")
    found = case.status()
    assert (found.state, found.leftovers) == ("partial", (FIRST, NAMES, TREE))
    assert found.reason == "SGLang 0.5.11 was installed again under d-0001; 3 files of d-0001 are left over"
    refused("d-0001 is not in place any more", case.transport.call, "confirm", ASKED)
    assert case.push(OLD).id == "d-0002"
    assert case.status().state == "applied"
    back = deploy.rollback(case.transport)
    assert (back.undone, back.to) == (("d-0002",), "base")
    assert case.is_pristine(OLD)


def test_another_build_of_the_same_release(case: Case, wheels: dict[str, Path], tmp_path: Path):
    """The version is the same and the files are not: the base is another one all the same."""
    other = {**FILES[OLD], "srt/a.py": b"VALUE = 11\n", "srt/gone.py": b"GONE = 11\n"}
    case.wheels = {**case.wheels, OLD: build_wheel(tmp_path / "other", OLD, other)}
    case.upgrade(OLD, "--reinstall")
    found = case.status()
    assert (found.state, "another build of 0.5.11 under d-0001" in found.reason) == ("upgraded", True)
    case.wheels = wheels
    refused("no overlay that was offered is for what is installed now", case.plan(OLD).check)
    bundle, files = bundle_for(case.install.root, {"srt/a.py": b"VALUE = 55\n"})
    deploy.push(case.transport, deploy.plan_push(case.transport, bundle, files), files, operator="ann")
    deploy.rollback(case.transport)
    assert (case.install.root / "srt/a.py").read_bytes() == b"VALUE = 11\n"


def test_a_reinstall_over_a_push_that_was_cut_off(case: Case, monkeypatch: pytest.MonkeyPatch):
    """What was installed again is no edit by hand: it stays, and what is left of the push goes."""
    bundle, files = bundle_for(case.folder / f"unpacked-{OLD}/sglang", {"srt/a.py": b"VALUE = 6\n", "srt/z.py": b""})
    with sabotaged(monkeypatch, "swap", "put", 2), pytest.raises(OverlayError):
        deploy.push(case.transport, deploy.plan_push(case.transport, bundle, files), files, operator="ann")
    case.upgrade(OLD, "--reinstall")
    assert case.push(OLD).current
    assert case.status().state == "applied"
    assert not (case.install.root / "srt/z.py").exists()
    deploy.rollback(case.transport)
    assert case.is_pristine(OLD)


def test_an_uninstall(case: Case):
    """Only a purge is left: pip has removed what a rollback would go back to (pip#11835, #13964)."""
    case.pip("uninstall", "-y", "sglang")
    found = case.status()
    assert (found.state, found.leftovers) == ("orphaned", (FIRST, NAMES, TREE))
    assert "--purge" in found.next_step
    refused("uninstalled under the overlay", case.plan, OLD)
    refused("no base to go back to", deploy.rollback, case.transport)
    assert [d.id for d in deploy.history(case.transport)] == ["d-0001"]
    assert deploy.rollback(case.transport, purge=True).removed == 3
    assert not case.install.root.exists()
    assert not case.install.state.exists()


def test_a_reinstall_by_pip(case: Case):
    """As by uv; the compiled files that pip has made do not stand in the way."""
    case.pip("install", "--no-deps", "--force-reinstall", case.wheels[OLD])
    assert case.status().reason.startswith("SGLang 0.5.11 was installed again under d-0001")
    case.push(OLD)
    assert case.install.run("import sglang.srt.a as a; print(a.VALUE)") == "5"
    deploy.rollback(case.transport)
    assert case.install.run("import sglang.srt.a as a; print(a.VALUE)") == "1"
    assert case.is_pristine(OLD)


def test_the_cache_of_uv_is_not_touched(case: Case):
    """What an upgrade has linked to the cache is replaced there by a push, never written through (uv#10579)."""
    case.upgrade()
    cache = listing(case.uv.cache)
    assert (case.install.root / "srt/a.py").stat().st_nlink > 1
    case.push(NEW)
    deploy.rollback(case.transport)
    assert case.is_pristine(NEW)
    assert differences(cache, listing(case.uv.cache)) == []
