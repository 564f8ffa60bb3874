# SPDX-License-Identifier: Apache-2.0
"""Somebody upgrades SGLang under the overlay: real pip and uv, a real sshd, and what every verb makes of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.servers import Server
from tests.support.trees import differences
from tests.support.waiting import HANG

from ddtree_overlay import deploy, doctor, export, proving
from ddtree_overlay.errors import ConflictError, RolledBackError
from ddtree_overlay.hosts.transport import open_transport
from ddtree_overlay.reports import plain, status_lines
from ddtree_overlay.snapshots import snapshot_host


if TYPE_CHECKING:
    from tests.support.sshd import SshServer
from tests.support.upgrades import FILES, FIRST, NAMES, NEW, OLD, RESULTS, TREE, UNKNOWN, Case, refused


ASKED = {"operator": "ann@desk", "lock_wait": 0, "note": ""}


def test_an_upgrade_by_pip_and_a_push_for_the_new_release(case: Case):
    """Status says what happened; the old bundle is refused; the new one starts anew, and goes back to the new one."""
    case.pip("install", "--no-deps", "-U", case.wheels[NEW])
    found = case.status()
    assert (found.state, found.version, found.overlay_id) == ("upgraded", NEW, None)
    assert found.reason == "SGLang 0.5.11 was replaced by 0.5.12 under d-0001; 3 files of d-0001 are left over"
    assert found.leftovers == (FIRST, NAMES, TREE)
    shown = "\n".join(map(plain, status_lines(found)))
    assert all(f"! {path}" in shown for path in found.leftovers)
    assert "srt/a.py" not in shown
    assert "next: ddtree-overlay snapshot --host gpu && ddtree-overlay patch --host gpu && ddtree-overlay push" in shown

    before = case.tree()
    error = refused("SGLang 0.5.11 was replaced by 0.5.12 under d-0001", case.plan(OLD).check)
    assert isinstance(error, ConflictError)
    assert error.next_step.startswith("ddtree-overlay snapshot --host gpu")
    for to in (None, "base"):
        error = refused("no base to go back to", deploy.rollback, case.transport, to=to, operator="ann")
        assert "rollback --host gpu --purge" in error.next_step
    refused("d-0001 is not in place any more", case.transport.call, "confirm", ASKED)
    checks = doctor.diagnose(case.transport).checks
    assert [(c.name, c.level) for c in checks if "replaced by 0.5.12" in c.message] == [("overlay", "warning")]
    assert differences(before, case.tree()) == []

    done = case.push(NEW)
    assert (done.id, done.version) == ("d-0002", NEW)
    assert done.note == "found before it: SGLang 0.5.11 was replaced by 0.5.12 under d-0001"
    assert case.status().state == "applied"
    assert not (case.install.root / FIRST).exists()
    assert (case.install.root / NAMES).read_bytes() == b"N = 12\n"
    history = deploy.history(case.transport)
    assert [(d.id, d.version, d.current) for d in history] == [("d-0001", OLD, False), ("d-0002", NEW, True)]

    refused("d-0001 is not below the live deployment", deploy.plan_rollback, case.transport, to="d-0001")
    assert deploy.rollback(case.transport).to == "base"
    assert case.is_pristine(NEW)
    # Its compiled files, of the older overlay as well, went with it.
    assert not (case.install.root / TREE).parent.exists()


def test_the_overlay_for_the_new_release_is_found_among_several(case: Case):
    """Older modules lie where the new ones will, and the bundle for the new base is not the first that is offered."""
    case.upgrade()
    offered = [[{**row, "size": 1} for row in case.bundle(version)[0].rows()] for version in (OLD, NEW)]
    plan = case.transport.call("plan_push", {"candidates": offered, "releases": [OLD, NEW]}).result
    assert (plan["chosen"], plan["blockers"]) == (1, [])


def test_up_and_down_again(case: Case):
    """Back on the older release, it is the one that a rollback goes back to; nothing of either overlay is left."""
    case.upgrade()
    case.push(NEW)
    case.upgrade(OLD)
    assert case.status().reason.startswith("SGLang 0.5.12 was replaced by 0.5.11 under d-0002; 2 files")
    refused("was replaced by 0.5.11", case.plan(NEW).check)
    assert case.push(OLD).id == "d-0003"
    assert deploy.rollback(case.transport).to == "base"
    assert case.is_pristine(OLD)


def test_an_export_after_an_upgrade(case: Case, tmp_path: Path):
    """apply.py of the old release refuses, and asks for another export; that of the new one does as a push does."""

    def apply(version: str, *words: str) -> tuple[int, dict[str, Any]]:
        folder = tmp_path / f"export-{version}"
        for path, data in export.export_files(*case.bundle(version)).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
        command = [case.install.python, folder / "apply.py", *words]
        done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=HANG, check=False)
        return done.returncode, json.loads(done.stdout)

    case.upgrade()
    code, answer = apply(OLD, "push")
    assert (code, "was replaced by 0.5.12" in answer["what"]) == (4, True)
    assert "then export it for the SGLang here" in answer["next"]
    code, answer = apply(OLD, "rollback")
    assert (code, "no base to go back to" in answer["what"]) == (4, True)
    code, answer = apply(NEW, "push")
    assert (code, answer["deployment"]["id"]) == (0, "d-0002")
    assert apply(NEW, "rollback")[0] == 0
    assert case.is_pristine(NEW)


def test_a_snapshot_after_an_upgrade_leaves_out_what_was_left_behind(case: Case):
    """What pip left behind is no part of the new base: no rollback is needed in between."""
    case.upgrade()
    wanted = {*FILES[NEW], *RESULTS[OLD]}
    manifest, files = snapshot_host(case.transport, "gpu", wanted)
    assert files == FILES[NEW]
    assert manifest.release == NEW
    assert any("left over from an earlier deployment" in w and FIRST in w for w in case.transport.warnings)


def test_purge_after_an_upgrade_takes_away_what_was_left_behind(case: Case):
    """The way out without a push: the new release as pip installed it, and no state folder."""
    case.upgrade()
    assert deploy.rollback(case.transport, purge=True).removed == 3
    assert case.is_pristine(NEW)
    assert not case.install.state.exists()


def test_an_upgrade_to_a_release_that_is_not_supported(case: Case):
    """No snapshot is advised, for nothing can be built from it."""
    case.upgrade(UNKNOWN)
    found = case.status()
    assert (found.state, found.version) == ("upgraded", UNKNOWN)
    assert found.next_step.startswith("ddtree-overlay rollback --host gpu --purge")
    assert "snapshot" not in found.next_step
    error = refused("was replaced by 0.9.0", case.plan(OLD).check)
    assert "pip install sglang==" in error.next_step
    assert any(
        c.level == "warning" and "not one of the supported" in c.message for c in doctor.diagnose(case.transport).checks
    )


def test_a_push_that_was_planned_before_is_refused_by_the_agent(case: Case):
    """A plan is one thing; the agent looks at the whole installation again under its lock."""
    case.upgrade()
    plan, files = case.plan(NEW), case.bundle(NEW)[1]
    (case.install.root / "srt/fresh.py").unlink()
    error = refused(
        "1 of 5 modules that its metadata lists are missing: srt/fresh",
        deploy.push,
        case.transport,
        plan,
        files,
        operator="ann",
    )
    assert isinstance(error, ConflictError)
    assert (case.install.root / "srt/a.py").read_bytes() == b"VALUE = 100\n"


def test_a_file_of_the_old_release_never_comes_back(case: Case):
    """A patched file that the new release has not, and that was not removed either, goes with the old deployment."""
    kept = (case.install.root / "srt/gone.py").read_bytes()
    case.upgrade()
    (case.install.root / "srt/gone.py").write_bytes(kept)
    case.push(NEW)
    assert not (case.install.root / "srt/gone.py").exists()
    deploy.rollback(case.transport)
    assert case.is_pristine(NEW)


def test_a_server_that_was_started_before_an_upgrade_has_older_code(case: Case):
    """It does not matter who replaced the files: pip, or a push."""
    code = "import sglang.srt.a, time; print('up', flush=True); time.sleep(600)"
    time.sleep(0.2)
    server = subprocess.Popen([case.install.python, "-c", code], stdout=subprocess.PIPE, cwd="/")
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == b"up\n"
        assert [(p.pid, p.stale) for p in case.status().processes] == [(server.pid, False)]
        case.upgrade()
        assert [(p.pid, p.stale) for p in case.status().processes] == [(server.pid, True)]
        case.push(NEW)
        assert [(p.pid, p.stale) for p in case.status().processes] == [(server.pid, True)]
    finally:
        server.kill()
        server.wait()


def test_a_restart_that_restarts_nothing_after_an_upgrade(case: Case, sshd: SshServer, tmp_path: Path):
    """The live server still reports the overlay of the release that is gone: the new files go back to the new base."""
    deploy.rollback(case.transport, purge=True)
    server = Server.create(case.install, tmp_path / "server")
    bundle, files = server.overlay()
    deploy.push(case.transport, deploy.plan_push(case.transport, bundle, files), files, operator="ann")
    info = server.start()
    try:
        assert info["speculative_ddtree_overlay_id"] == bundle.overlay_id
        case.upgrade()
        shutil.rmtree(server.folder / "pristine")
        shutil.copytree(case.install.root, server.folder / "pristine")
        shutil.rmtree(server.folder / "pristine/srt/speculative/ddtree")
        newer, files = server.overlay("well", "newer")
        host = sshd.host("gpu", str(case.install.python), restart=("true",), health=server.health(2.0))
        with open_transport(host) as transport:
            plan = deploy.plan_push(transport, newer, files)
            with pytest.raises(RolledBackError, match="still running the old code") as caught:
                proving.push(transport, plan, files, operator="ann", progress=lambda _: None)
        assert bundle.overlay_id in caught.value.what
        assert case.is_pristine(NEW)
    finally:
        server.stop()
