# SPDX-License-Identifier: Apache-2.0
"""`push --restart`, `rollback --restart` and `confirm` as commands: exit codes, what is said where, and the JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.conftest import RELEASE, Run
from tests.support.commands import begin, heard, outcome
from tests.support.installs import Install, new_venv, tiny_package
from tests.support.servers import Server
from tests.support.trees import differences, listing
from tests.support.waiting import HANG

from ddtree_overlay.workspace import Workspace


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A running server of a package with the outline of SGLang."""
    python, site = new_venv(tmp_path / "tiny")
    tiny_package(site, RELEASE)
    server = Server.create(Install(python, site), tmp_path / "server")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def configured(server: Server, workspace: Path) -> Path:
    """A workspace whose host `gpu` is the server, and that holds a bundle for it."""
    configure(workspace, server)
    build(workspace, server)
    return workspace


def configure(workspace: Path, server: Server, restart: str | None = None, timeout: float = HANG) -> None:
    command = json.dumps(server.restart[0] if restart is None else restart)
    lines = [
        "[hosts.gpu]",
        'transport = "local"',
        f'python = "{server.install.python}"',
        *([f"restart = {command}"] if restart != "" else []),
        "[hosts.gpu.health]",
        f'url = "{server.url}"',
        f"timeout = {server.health(timeout).timeout}",
    ]
    (workspace / "deploy.toml").write_text("\n".join(lines) + "\n")


def build(workspace: Path, server: Server, mode: str = "well", mark: str = "") -> str:
    bundle, files = server.overlay(mode, mark)
    Workspace(workspace).save_bundle(bundle, files)
    return bundle.overlay_id


def test_push_with_a_restart_says_what_it_waits_for_and_exits_0(
    run: Run, configured: Path, server: Server, tmp_path: Path
):
    """Progress goes to stderr with the seconds, the result to stdout; status and history say good."""
    # A server that is up at once is not waited for: this one comes once that was said.
    (server.folder / "held").touch()
    child = begin(configured, tmp_path / "home", "push", "--host", "gpu", "--restart", "--yes")
    said = heard(child, "waiting for overlay")
    (server.folder / "held").unlink()
    done = outcome(child, said)

    assert done.code == 0, done.err
    assert "gpu: pushed as d-0001 (good)" in done.out and "gpu: live: the server runs overlay" in done.out
    assert "gpu: restarting the server for d-0001" in done.err
    assert "gpu: waiting for overlay" in done.err and " s)" in done.err
    assert "d-0001 (good)" in run("status", "--host", "gpu").out
    again = run("push", "--host", "gpu", "--restart", "--yes", "--json").json
    assert (again["ok"], again["changed"], again["proof"]["ok"], again["proof"]["restarted"]) == (
        True,
        False,
        True,
        False,
    )


def test_a_failed_push_exits_6_and_says_what_became_of_the_host(run: Run, configured: Path, server: Server):
    """One error with what, why and the next command, on stderr and as JSON; the tree is as it was, byte for byte."""
    build(configured, server, "dumb")
    configure(configured, server, timeout=4.0)
    before = listing(server.install.root)

    done = run("push", "--host", "gpu", "--restart", "--yes", "--json")

    assert done.code == done.json["exit_code"] == 6
    assert "d-0001 was rolled back: the server does not generate" in done.json["what"]
    assert "base is back in place: the server runs no overlay" in done.json["why"]
    assert "ddtree-overlay history --host gpu" in done.json["next"]
    after = {p: w for p, w in listing(server.install.root).items() if "__pycache__" not in p}
    assert differences({p: w for p, w in before.items() if "__pycache__" not in p}, after) == []
    assert "d-0001  bad" in run("history", "--host", "gpu").out


def test_a_host_that_does_not_come_back_exits_7_with_lines_to_run(run: Run, configured: Path, server: Server):
    """The manual lines are complete and quoted for a shell on the host."""
    configure(configured, server, timeout=1.0)
    (server.folder / "broken").touch()

    done = run("push", "--host", "gpu", "--restart", "--yes")

    assert done.code == 7
    assert "its files were put back, but the server does not come up with base" in done.err
    assert f"next: # on the host:\n        {server.restart[0]}\n        tail " in done.err
    assert "curl -fsS http://127.0.0.1:" in done.err and "ddtree-overlay status --host gpu" in done.err


def test_a_host_without_a_restart_is_refused_before_it_is_connected_to(run: Run, configured: Path, server: Server):
    """Exit 2, and nothing on the host has changed; a folder has nothing to restart at all."""
    configure(configured, server, restart="")
    before = listing(server.install.site)

    for verb in ("push", "rollback"):
        done = run(verb, "--host", "gpu", "--restart", "--yes")
        assert (done.code, "[hosts.gpu]" in done.err) == (2, True)
    folder = run("push", "--root", str(server.install.root), "--restart", "--yes")

    assert folder.code == 2 and "--root has nothing to restart" in folder.err
    assert differences(before, listing(server.install.site)) == []


def test_a_dry_run_finds_out_whether_a_restart_could_be_run_and_checked(run: Run, configured: Path, server: Server):
    """It says what serves now, restarts nothing, and refuses what the real run would refuse."""
    before = listing(server.install.site)

    done = run("push", "--host", "gpu", "--restart", "--dry-run")
    configure(configured, server, restart="docker-that-is-not-there restart web")
    refused = run("push", "--host", "gpu", "--restart", "--dry-run")

    assert done.code == 0 and "can be restarted and asked; now: no overlay, algorithm none" in done.err
    assert refused.code == 1 and "there is no program 'docker-that-is-not-there'" in refused.err
    assert "`restart` runs where the agent runs" in refused.err
    assert server.restarts() == ["unset"] and differences(before, listing(server.install.site)) == []


@pytest.mark.usefixtures("configured")
def test_rollback_with_a_restart_is_proven(run: Run, server: Server):
    """The old server serves again before the command ends; --purge has to wait until then."""
    assert run("push", "--host", "gpu", "--restart", "--yes").code == 0

    refused = run("rollback", "--host", "gpu", "--purge", "--restart", "--yes")
    done = run("rollback", "--host", "gpu", "--restart", "--yes", "--json")

    assert refused.code == 2 and "--purge does not go with --restart" in refused.err
    assert (done.code, done.json["proof"]["ok"], done.json["result"]["to"]) == (0, True, "base")
    assert "speculative_ddtree_overlay_id" not in server.info()


@pytest.mark.usefixtures("configured")
def test_status_leads_from_a_pending_deployment_to_its_proof(run: Run, server: Server):
    """Pushed without a restart: pending, the old process is named, and what the live server denies is not confirmed."""
    assert run("push", "--host", "gpu", "--yes").code == 0
    pid = server.info()["pid"]

    status = run("status", "--host", "gpu").out
    assert "d-0001 (pending)" in status and f"pid {pid}" in status
    assert "ddtree-overlay push --host gpu --restart" in status
    assert "ddtree-overlay confirm --host gpu" in status
    denied = run("confirm", "--host", "gpu")
    assert denied.code == 1 and "d-0001 was not confirmed: the live server runs no overlay" in denied.err

    done = run("push", "--host", "gpu", "--restart", "--yes")
    assert done.code == 0 and "gpu: live" in done.out
    said = run("confirm", "--host", "gpu", "--note", "seen", "--json").json
    assert (said["changed"], said["deployment"]["state"]) == (False, "good")


@pytest.mark.usefixtures("configured")
def test_confirm_says_when_no_server_could_be_asked(run: Run, server: Server):
    """A word that nobody could check is taken, but not silently."""
    assert run("push", "--host", "gpu", "--yes").code == 0
    server.stop()

    word = run("confirm", "--host", "gpu")
    again = run("confirm", "--host", "gpu", "--json").json

    assert word.code == 0 and "gpu: d-0001 is good now" in word.out
    assert "the live server could not be asked, so this is your word alone: Connection refused" in word.err
    assert (again["said"], again["checked"]) == ("Connection refused", False)


@pytest.mark.usefixtures("configured")
def test_each_next_line_of_status_is_a_command(run: Run, server: Server):
    """One a line, prose only behind a `#`; a folder without a host is not told to restart anything."""
    assert run("push", "--host", "gpu", "--yes").code == 0
    place = str(server.install.root)

    steps = run("status", "--host", "gpu", "--json").json["next"].splitlines()
    folder = run("status", "--root", place, "--json").json["next"].splitlines()

    assert steps == [
        "ddtree-overlay push --host gpu --restart",
        "ddtree-overlay confirm --host gpu  # once it was restarted by other means",
    ]
    assert folder == [f"ddtree-overlay confirm --root {place}  # once it was restarted by other means"]


@pytest.mark.parametrize("missing", ["restart", "health"])
def test_a_host_that_cannot_be_restarted_from_here_is_not_told_to(run: Run, server: Server, workspace: Path, missing):
    """`push --restart` would be refused: what is left is the operator's own restart."""
    configure(workspace, server)
    build(workspace, server)
    path = workspace / "deploy.toml"
    whole = path.read_text()
    cut = [line for line in whole.splitlines() if not line.startswith("restart")]
    path.write_text("\n".join(cut) if missing == "restart" else whole.partition("[hosts.gpu.health]")[0])
    assert run("push", "--host", "gpu", "--yes").code == 0

    found = run("status", "--host", "gpu", "--json").json

    assert found["next"] == "ddtree-overlay confirm --host gpu  # once it was restarted by other means"
    assert run("push", "--host", "gpu", "--restart", "--yes").code == 2
