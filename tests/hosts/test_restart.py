# SPDX-License-Identifier: Apache-2.0
"""Push with a restart: against a real HTTP server that imports the installed tree, over a real sshd."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.installs import Install, bundle_for
from tests.support.servers import Server
from tests.support.sshd import SshServer, sessions_of
from tests.support.trees import differences, listing

from ddtree_overlay import deploy, proving
from ddtree_overlay.config import Health, Host
from ddtree_overlay.errors import (
    ConfigError,
    ConflictError,
    LockedError,
    OverlayError,
    RollbackIncompleteError,
    RolledBackError,
    UsageError,
)
from ddtree_overlay.hosts.transport import open_transport
from ddtree_overlay.manifest import OVERLAY_ID_PATH
from ddtree_overlay.remote import lock
from ddtree_overlay.reports import plain, status_lines


@pytest.fixture
def server(tiny: Install, tmp_path: Path) -> Iterator[Server]:
    """A running server of the tiny package, without an overlay."""
    server = Server.create(tiny, tmp_path / "server")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def host(sshd: SshServer, server: Server) -> Host:
    """The server's host, over SSH, with a restart command that works."""
    python = str(server.install.python)
    return sshd.host("gpu", python, restart=server.restart, restart_timeout=5.0, health=server.health())


@pytest.fixture
def lines() -> list[str]:
    """What the operator is told."""
    return []


def tree(server: Server) -> dict[str, str]:
    found = listing(server.install.root)
    return {path: what for path, what in found.items() if "__pycache__" not in path}


def push(host: Host, server: Server, mode: str = "well", mark: str = "", *, tell: Callable[[str], None] = print) -> Any:
    bundle, files = server.overlay(mode, mark)
    with open_transport(host) as transport:
        plan = deploy.plan_push(transport, bundle, files)
        return proving.push(transport, plan, files, operator="alice", progress=tell)


def failed(host: Host, server: Server, kind: type[OverlayError], mode: str = "well", mark: str = "") -> OverlayError:
    with pytest.raises(kind) as caught:
        push(host, server, mode, mark)
    return caught.value


def history(host: Host) -> list[deploy.Deployment]:
    with open_transport(host) as transport:
        return deploy.history(transport)


def states(host: Host) -> list[tuple[str, str, bool, bool]]:
    return [(d.id, d.state, d.current, d.undone is not None) for d in history(host)]


def test_a_push_whose_server_comes_up_with_the_overlay_is_good(host: Host, server: Server, lines: list[str]):
    """Pushed, restarted, and proven by what the live server reports and by a token that it makes (Hyperloom#516)."""
    old = server.info()["pid"]

    done, proof = push(host, server, tell=lines.append)

    assert (done.state, done.current, proof.ok, proof.verdict) == ("good", True, True, "live")
    assert server.info()["speculative_ddtree_overlay_id"] == done.overlay_id
    assert server.info()["pid"] != old
    assert server.restarts() == ["unset", done.overlay_id]
    assert any(re.search(r"waiting for overlay .*\(\d+ s\)", line) for line in lines), lines
    with open_transport(host) as transport:
        # The old server may take a moment to be gone.
        until(lambda: [p.stale for p in deploy.status(transport).processes] == [False])
        found = deploy.status(transport)
    assert (found.state, found.deployment.state) == ("applied", "good")


def test_a_second_push_with_a_restart_leaves_a_server_that_is_live_alone(host: Host, server: Server):
    """What runs already is neither written nor restarted again."""
    first, _ = push(host, server)
    pid = server.info()["pid"]

    again, proof = push(host, server)

    assert (again.id, again.state, proof.ok, proof.restarted) == (first.id, "good", True, False)
    assert server.info()["pid"] == pid


def test_a_server_that_ran_on_through_a_rollback_is_restarted_all_the_same(host: Host, server: Server):
    """It reports the overlay, but nobody has seen it come up with the files of this push."""
    push(host, server)
    pid = server.info()["pid"]
    with open_transport(host) as transport:
        deploy.rollback(transport, operator="alice")
    assert server.info()["pid"] == pid

    again, proof = push(host, server)

    assert (again.id, again.state, proof.ok, proof.restarted) == ("d-0002", "good", True, True)
    assert server.info()["pid"] != pid


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("crash", "no server came up: "),
        ("mute", "no server came up: no answer"),
        ("dumb", "the server does not generate: "),
        ("dflash", "runs algorithm DFLASH; start it with --speculative-algorithm DDTREE"),
    ],
)
def test_a_server_that_does_not_come_up_well_is_rolled_back(host: Host, server: Server, mode: str, says: str):
    """Dead, deaf, up without generating, up without DDTREE: exit 6, the old server is back, the tree is as it was."""
    good, _ = push(host, server)
    before = tree(server)

    error = failed(replace(host, health=server.health(4.0)), server, RolledBackError, mode)

    assert error.exit_code == 6
    assert error.what.startswith("d-0002 was rolled back: ") and says in error.what
    assert "d-0001 is back in place: the server runs overlay" in error.why
    assert differences(before, tree(server)) == []
    assert server.info()["speculative_ddtree_overlay_id"] == good.overlay_id
    assert states(host) == [("d-0001", "good", True, False), ("d-0002", "bad", False, True)]
    assert "hush-hush" not in str(error)


def test_the_first_push_is_rolled_back_to_the_base(host: Host, server: Server):
    """Without any deployment below it, what has to serve again is the install as it was, not one byte more."""
    before = tree(server)

    error = failed(replace(host, health=server.health(4.0)), server, RolledBackError, "crash")

    assert "base is back in place: the server runs no overlay" in error.why
    assert differences(before, tree(server)) == []
    assert server.info()["speculative_algorithm"] is None
    assert server.restarts()[-1] == ""


def test_a_restart_that_restarts_nothing_is_noticed(host: Host, server: Server):
    """The command succeeds, the container stays (ODS#1279, xr-ai#150): the files go back, the deployment stays pending.

    The new code has not run: it is not bad. Nor may it lie in wait for the next crash of a server that nobody watches.
    """
    before, pid = tree(server), server.info()["pid"]

    error = failed(replace(host, restart=("true",), health=server.health(1.5)), server, RolledBackError)

    assert "still running the old code" in error.what and f"pid {pid}" in error.what
    assert "nothing was restarted" in error.what
    assert "restart" in error.next_step and error.next_step.endswith("true")
    assert differences(before, tree(server)) == []
    assert (server.info()["pid"], states(host)) == (pid, [("d-0001", "pending", False, True)])
    assert "still running the old code" in history(host)[0].note


def test_a_restart_that_restarts_something_else_is_noticed(host: Host, server: Server, tmp_path: Path):
    """A server that comes up from another install reports no overlay, or another one; it is not ours (sglang#33441)."""
    other = tmp_path / "other"
    shutil.copytree(server.folder / "pristine", other / "sglang")
    script = server.folder / "elsewhere"
    script.write_text(f"#!/bin/sh\nPYTHONPATH={other} exec {server.restart[0]}\n")
    script.chmod(0o755)
    one, _ = push(host, server)

    error = failed(
        replace(host, restart=(str(script),), health=server.health(1.5)), server, RollbackIncompleteError, mark="2"
    )

    assert "reports no overlay, algorithm none instead of overlay" in error.why
    assert f"should report overlay {one.overlay_id}" in error.next_step
    assert states(host) == [("d-0001", "good", True, False), ("d-0002", "bad", False, True)]


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("sh", "-c", "echo --api-key hush-hush; exit 5"), "ended with exit status 5"),
        (("sh", "-c", "trap '' TERM; sleep 60 & sleep 60"), "did not end in time; it was killed"),
        (("sh", "-c", "kill -9 $$"), "ended with signal 9"),
    ],
)
def test_a_restart_command_that_fails_or_hangs_is_rolled_back(
    host: Host, server: Server, command: tuple[str, ...], says: str
):
    """The old server was not touched, so the files go back and it serves on; what the command said is shown."""
    before, pid = tree(server), server.info()["pid"]

    error = failed(replace(host, restart=command, restart_timeout=0.5), server, RolledBackError)

    assert says in error.what
    assert "hush-hush" not in str(error)
    assert ("--api-key ***" in error.why) == ("exit 5" in command[-1])
    assert differences(before, tree(server)) == []
    assert server.info()["pid"] == pid
    assert states(host) == [("d-0001", "pending", False, True)]
    if "sleep" in command[-1]:
        assert not any(b"sleep\x0060" in c for c in command_lines()), "what the command had started still runs"


def test_a_restart_that_stops_the_server_and_fails_has_tried_the_new_code(host: Host, server: Server):
    """Nothing serves any more: going back needs the same restart, and when that fails too the host needs a person."""
    before = tree(server)
    stop = ("sh", "-c", f"kill $(cat {server.folder}/pid); sleep 0.3; exit 5")

    error = failed(replace(host, restart=stop, health=server.health(1.0)), server, RollbackIncompleteError)

    assert "does not come up with base" in error.what and "exit status 5" in error.why
    assert "kill $(cat " in error.next_step, "the manual lines are the restart command"
    assert differences(before, tree(server)) == []
    assert states(host) == [("d-0001", "bad", False, True)]


def test_a_log_that_cannot_be_written_does_not_stop_a_deploy_half_way(host: Host, server: Server):
    """The files are in place by then: whatever happens to what is written on the side, they are tried or taken back."""
    for name in ("restart.log", "trial.json"):
        (server.install.state / name).mkdir(parents=True)

    done, proof = push(host, server)
    error = failed(replace(host, health=server.health(4.0)), server, RolledBackError, "dumb")

    assert (done.state, proof.ok) == ("good", True)
    assert "d-0001 is back in place" in error.why


@pytest.mark.usefixtures("namespaces")
def test_a_restart_runs_where_the_agent_runs_behind_the_prefix(host: Host, server: Server):
    """With `sudo -n` that is root, with `docker exec` the container: there is one rule, and the lock is there too."""
    script = server.folder / "inside"
    script.write_text(f"#!/bin/sh\nreadlink /proc/self/ns/mnt > {server.folder}/where\nexec {server.restart[0]}\n")
    script.chmod(0o755)

    done, proof = push(replace(host, exec_prefix=("unshare", "--mount"), restart=(str(script),)), server)

    assert (done.state, proof.ok) == ("good", True)
    where = (server.folder / "where").read_text().strip()
    assert where != os.readlink("/proc/self/ns/mnt")
    assert where == os.readlink(f"/proc/{server.info()['pid']}/ns/mnt")


def command_lines() -> list[bytes]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes())
    return found


def test_a_rollback_whose_server_does_not_come_up_is_incomplete(host: Host, server: Server):
    """Exit 7: the files are back, the old server is not; the lines that start it are there (atomic-host-tests#155)."""
    good, _ = push(host, server)
    before = tree(server)
    (server.folder / "broken").touch()

    error = failed(replace(host, health=server.health(1.5)), server, RollbackIncompleteError, mark="2")

    assert error.exit_code == 7
    assert "its files were put back, but the server does not come up with d-0001" in error.what
    assert differences(before, tree(server)) == []
    assert states(host) == [("d-0001", "good", True, False), ("d-0002", "bad", False, True)]
    (server.folder / "broken").unlink()
    by_hand, _, here = error.next_step.removeprefix("on the host: ").partition("\n")
    assert here == "ddtree-overlay status --host gpu"
    deadline = time.monotonic() + 10
    ran = subprocess.run(["sh", "-c", by_hand.replace("curl -fsS", "true")], check=False, capture_output=True)
    assert ran.returncode == 0, ran.stderr
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if server.info()["speculative_ddtree_overlay_id"] == good.overlay_id:
                return
        time.sleep(0.1)
    pytest.fail("the manual lines did not bring the server up")


def test_files_that_cannot_be_put_back_make_it_incomplete(host: Host, server: Server):
    """Somebody edits a file while the server is waited for: exit 7, nothing of theirs is overwritten."""
    script = server.folder / "meddling"
    module = server.install.root / "srt/a.py"
    script.write_text(f"#!/bin/sh\necho 'MINE = 1' >> {module}\nexec {server.restart[0]}\n")
    script.chmod(0o755)

    meddled = replace(host, restart=(str(script),), health=server.health(1.0))
    error = failed(meddled, server, RollbackIncompleteError, "dumb")

    assert "its files could not be put back" in error.what
    assert "ddtree-overlay diff --host gpu" in error.next_step
    assert "ddtree-overlay rollback --host gpu --restart" in error.next_step
    assert b"MINE" in module.read_bytes()
    assert states(host) == [("d-0001", "bad", True, False)]


def in_background(host: Host, server: Server, mode: str, mark: str = "") -> threading.Thread:
    """A push by somebody whose connection may be cut; what becomes of it there does not matter."""

    def run() -> None:
        with contextlib.suppress(OverlayError):
            push(host, server, mode, mark)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def until(condition: Callable[[], Any], seconds: float = 15.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)
    return found


def trial(server: Server) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads((server.install.state / "trial.json").read_bytes()))
    return {}


def agents(server: Server) -> list[int]:
    """The agents that run for this install."""
    python = str(server.install.python).encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if words[0] == python and any(w.startswith(b"ddtree-") for w in words):
                found.append(int(path.parent.name))
    return found


def test_a_host_goes_back_by_itself_when_the_client_is_cut_off(host: Host, server: Server, sshd: SshServer):
    """The connection ends while the server is waited for: the host still rolls back, restarts and checks."""
    good, _ = push(host, server)
    before = tree(server)
    thread = in_background(replace(host, health=server.health(4.0)), server, "dumb")
    until(lambda: trial(server).get("phase") == "the server was waited for" and trial(server)["id"] == "d-0002")

    for pid in sessions_of(sshd):
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        if name.startswith("sshd"):
            os.kill(pid, signal.SIGKILL)
    thread.join(20)

    until(lambda: not agents(server))
    assert states(host) == [("d-0001", "good", True, False), ("d-0002", "bad", False, True)]
    assert differences(before, tree(server)) == []
    assert server.info()["speculative_ddtree_overlay_id"] == good.overlay_id
    assert trial(server) == {}


def test_a_second_pusher_is_refused_while_a_server_is_waited_for(host: Host, server: Server):
    """The lock is held through the restart and the health check (kamal#1930)."""
    thread = in_background(replace(host, health=server.health(2.5)), server, "dumb")
    until(lambda: trial(server).get("phase") == "the server was waited for")

    with open_transport(host) as transport:
        found = deploy.status(transport)
    assert found.unfinished.startswith("alice is running a push with a restart here")
    with pytest.raises(LockedError, match=r"alice .* has been running a push with a restart here"):
        push(host, server, mark="second")

    thread.join(20)
    until(lambda: not agents(server))
    assert states(host) == [("d-0001", "bad", False, True)]


@pytest.mark.parametrize(
    ("name", "phase", "state", "kept"),
    [
        ("d-0001", "the server was restarted", "applied", ("d-0001", "pending", True, False)),
        ("d-0001", "the server was waited for", "applied", ("d-0001", "pending", True, False)),
        ("base", "the server was restarted", "pristine", ("d-0001", "bad", False, True)),
        ("base", "the server was waited for", "pristine", ("d-0001", "bad", False, True)),
    ],
)
def test_an_agent_that_is_killed_leaves_a_state_that_says_what_to_do(
    host: Host, server: Server, *, name: str, phase: str, state: str, kept: tuple[str, str, bool, bool]
):
    """kill -9 in each phase: all files or none, the next contact sees how far it came, and the next push heals it."""
    slow = server.folder / "slow"
    slow.write_text(f"#!/bin/sh\n[ -e {server.folder}/fast ] || sleep 1\nexec {server.restart[0]}\n")
    slow.chmod(0o755)
    timeout = 0.5 if name == "base" and "restarted" in phase else 2.0
    thread = in_background(replace(host, restart=(str(slow),), health=server.health(timeout)), server, "dumb")
    if name == "base":
        until(lambda: trial(server).get("phase") == "the server was waited for")
        # Neither the new state nor the old one comes up.
        (server.folder / "broken").touch()
    until(lambda: (trial(server).get("id"), trial(server).get("phase")) == (name, phase))
    for pid in agents(server):
        os.kill(pid, signal.SIGKILL)
    thread.join(20)

    with open_transport(host) as transport:
        found = deploy.status(transport)
    text = "\n".join(plain(line) for line in status_lines(found))
    assert (found.state, found.unfinished, states(host)) == (state, "", [kept])
    assert f"the trial of {name} was cut off while {phase}" in text
    assert ("ddtree-overlay push --host gpu --restart" in text) == (state == "applied")

    (server.folder / "broken").unlink(missing_ok=True)
    done, proof = push(host, server, mark="healing")
    assert (done.state, proof.ok, trial(server)) == ("good", True, {})


def test_a_unit_that_systemd_gave_up_is_reset_before_it_is_started_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
):
    """A crashing overlay uses up the unit's starts; without reset-failed the rollback's restart would be refused too.

    microduck#143, omp-session-gateway#115.
    """
    monkeypatch.setenv("PATH", f"{server.folder / 'bin'}:{os.environ['PATH']}")
    unit = server.install.host("gpu", restart_unit="sglang.service", restart_timeout=10.0, health=server.health(15.0))
    good, _ = push(unit, server)
    before, start = tree(server), time.monotonic()

    error = failed(unit, server, RolledBackError, "crash")

    assert "no server came up: systemd has given sglang.service up" in error.what
    assert time.monotonic() - start < 15, "a unit that was given up is not waited for"
    assert differences(before, tree(server)) == []
    assert server.info()["speculative_ddtree_overlay_id"] == good.overlay_id
    said = [line for line in (server.folder / "systemctl.log").read_text().splitlines() if "is-failed" not in line]
    assert said[-2:] == ["reset-failed sglang.service", "restart sglang.service"]


def test_an_ignored_signal_is_not_handed_down_to_the_server(host: Host, server: Server):
    """The agent ignores SIGTERM; a server that inherited this could never be ended again."""
    push(host, server)

    pid = server.info()["pid"]
    status = Path(f"/proc/{pid}/status").read_text()
    ignored = int(re.search(r"SigIgn:\t(\w+)", status)[1], 16)
    assert not any(ignored >> (number - 1) & 1 for number in (signal.SIGHUP, signal.SIGTERM))


@pytest.mark.parametrize(
    ("over", "kind", "says"),
    [
        ({"restart": ()}, ConfigError, "deploy.toml does not say how"),
        ({"health": None}, ConfigError, "does not say where its server listens"),
        ({"restart": ("/no/such/program",)}, OverlayError, "there is no program '/no/such/program'"),
        ({"health": Health("http://127.0.0.1:1", 2.0, "/no/such/key")}, OverlayError, "the API key in /no/such/key"),
        ({"health": Health("http://no-such-name.invalid:30000", 2.0)}, OverlayError, "no-such-name.invalid:30000: "),
        ({"root": "/tmp", "transport": "local"}, UsageError, "--root has nothing to restart"),
    ],
)
def test_what_cannot_be_restarted_or_asked_is_refused_before_anything_is_written(
    host: Host, server: Server, over: dict[str, Any], kind: type[OverlayError], says: str
):
    """A deploy that could not be undone does not begin."""
    before = listing(server.install.site)
    bundle, files = server.overlay()
    with open_transport(host) as transport:
        plan = deploy.plan_push(transport, bundle, files)

    with open_transport(replace(host, **over)) as transport, pytest.raises(kind, match=re.escape(says)) as caught:
        proving.push(transport, plan, files, operator="alice", progress=print)

    assert caught.value.next_step
    assert differences(before, listing(server.install.site)) == []


def test_a_url_that_is_not_a_server_of_sglang_is_refused_before_anything_is_written(
    host: Host, server: Server, tmp_path: Path
):
    """A health check that asks the wrong door would roll back every deploy."""
    (tmp_path / "web").mkdir()
    words = [
        sys.executable,
        "-u",
        "-m",
        "http.server",
        "0",
        "--bind",
        "127.0.0.1",
        "--directory",
        str(tmp_path / "web"),
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL) as other:
        try:
            port = re.search(r"port (\d+)", other.stdout.readline())[1]
            wrong = replace(host, health=Health(f"http://127.0.0.1:{port}", 2.0))
            error = failed(wrong, server, OverlayError)
        finally:
            other.kill()

    assert error.exit_code == 1 and "does not answer like SGLang (404)" in error.what
    assert history(host) == []


def test_a_server_with_an_api_key_is_asked_with_the_key_that_lies_on_its_host(
    host: Host, server: Server, tmp_path: Path
):
    """The key stays on the host: deploy.toml names a file there."""
    key = tmp_path / "key"
    key.write_text("open sesame\n")
    script = server.folder / "keyed"
    script.write_text(f"#!/bin/sh\nKEY='open sesame' exec {server.restart[0]}\n")
    script.chmod(0o755)
    subprocess.run([script], check=True, timeout=10)
    locked = replace(host, restart=(str(script),))
    until(lambda: "speculative_algorithm" not in suppressed(server.info))

    error = failed(locked, server, OverlayError)
    done, _ = push(replace(locked, health=server.health(api_key_file=str(key))), server)

    assert "wants an API key (401)" in error.what and "api_key_file" in error.next_step
    assert (done.id, done.state) == ("d-0001", "good")


def suppressed(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    with contextlib.suppress(OSError):
        return call()
    return {"speculative_algorithm": "down"}


def test_a_bundle_that_no_server_could_report_is_refused(host: Host, server: Server):
    """A bundle of an earlier version has no module that names it; its proof would never come."""
    bundle, files = overlay_without_id(server)
    with open_transport(host) as transport:
        plan = deploy.plan_push(transport, bundle, files)
        with pytest.raises(OverlayError, match="could not report it") as caught:
            proving.push(transport, plan, files, operator="alice", progress=print)

    assert "ddtree-overlay patch --host gpu" in caught.value.next_step
    assert history(host) == []


def overlay_without_id(server: Server) -> Any:
    _, files = server.overlay()
    return bundle_for(server.folder / "pristine", {p: d for p, d in files.items() if p != OVERLAY_ID_PATH})


def test_a_rollback_with_a_restart_is_proven_too(host: Host, server: Server):
    """Back to the one before, restarted, and the live server says so; a hook that does nothing is exit 7."""
    first, _ = push(host, server)
    push(host, server, mark="2")

    with open_transport(host) as transport:
        plan = deploy.plan_rollback(transport)
        done, proof = proving.rollback(transport, plan, operator="bob", progress=print)
    assert (done.to, proof.ok) == ("d-0001", True)
    assert server.info()["speculative_ddtree_overlay_id"] == first.overlay_id

    idle = replace(host, restart=("true",), health=server.health(1.0))
    with open_transport(idle) as transport, pytest.raises(RollbackIncompleteError, match="nothing was restarted"):
        proving.rollback(transport, deploy.plan_rollback(transport), operator="bob", progress=print)
    assert [s[2] for s in states(host)] == [False, False]


def test_rollback_skips_deployments_that_are_bad(host: Host, server: Server):
    """One step back is the last one that is not known to fail (capistrano#1885, #2120)."""
    first, _ = push(host, server)
    with open_transport(host) as transport:
        for mark in ("2", "3"):
            bundle, files = server.overlay(mark=mark)
            done = deploy.push(transport, deploy.plan_push(transport, bundle, files), files, operator="alice")
            if mark == "2":
                proof = proving.Proof(False, "unhealthy", "it broke", 1.0, (), True)
                assert proving.settle(transport, done, proof, operator="alice").state == "bad"

        plan = deploy.plan_rollback(transport)
        assert (plan.to, plan.undoes) == (first.id, ("d-0003", "d-0002"))
        assert deploy.plan_rollback(transport, to="d-0002").to == "d-0002"


def test_confirm_takes_the_operators_word_unless_the_server_denies_it(host: Host, server: Server):
    """For a restart by other means; what the live server contradicts is not confirmed."""
    with open_transport(host) as transport:
        with pytest.raises(OverlayError, match="no overlay is deployed"):
            proving.confirm(transport, operator="carol")
        bundle, files = server.overlay()
        done = deploy.push(transport, deploy.plan_push(transport, bundle, files), files, operator="alice")
        assert done.state == "pending"

        with pytest.raises(OverlayError, match="d-0001 was not confirmed: the live server runs no overlay"):
            proving.confirm(transport, operator="carol")
        until(lambda: deploy.status(transport).processes[0].stale)
        server.start()
        until(lambda: "speculative_ddtree_overlay_id" in suppressed(server.info))

        assert [proving.confirm(transport, operator="carol", note="seen")[1] for _ in "ab"] == [False, True]
        found = deploy.history(transport)[0]
        assert (found.state, found.note) == ("good", "seen")
        (server.install.root / "srt/a.py").write_bytes(b"EDITED = 1\n")
        with pytest.raises(ConflictError, match="d-0001 is not in place any more"):
            proving.confirm(transport, operator="carol")


def test_prove_and_settle_are_the_steps_of_a_fleet(host: Host, server: Server):
    """Swap first, restart and prove later; what is not live on the host is not proven. The lock names who proves."""
    bundle, files = server.overlay()
    holders = set()

    def tell(_: str) -> None:
        if found := lock.holder(server.install.state):
            holders.add(found["operator"])

    with open_transport(host) as transport:
        done = deploy.push(transport, deploy.plan_push(transport, bundle, files), files, operator="alice")
        with pytest.raises(ConflictError, match="d-0001 is live here, not base"):
            proving.prove(transport, None, restart=True, progress=print)

        proof = proving.prove(transport, done, restart=True, progress=tell, operator="alice")
        assert holders == {"alice"}
        assert (proof.ok, deploy.history(transport)[0].state) == (True, "pending")
        assert proving.settle(transport, done, proof, operator="alice").state == "good"

        deploy.rollback(transport, operator="alice")
        assert proving.prove(transport, None, restart=True, progress=print).ok
    assert server.info()["speculative_algorithm"] is None
