# SPDX-License-Identifier: Apache-2.0
"""A trial that does not end as it should: a way back that fails, a client or an agent that is gone, a second pusher."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.servers import Server
from tests.support.sshd import SshServer, sessions_of
from tests.support.trees import differences
from tests.support.trials import (
    agents,
    failed,
    in_background,
    push,
    states,
    tree,
    trial,
    until,
)

from ddtree_overlay import deploy
from ddtree_overlay.config import Host
from ddtree_overlay.errors import (
    LockedError,
    RollbackIncompleteError,
)
from ddtree_overlay.hosts.transport import open_transport
from ddtree_overlay.reports import plain, status_lines


def test_a_rollback_whose_server_does_not_come_up_is_incomplete(host: Host, server: Server):
    """Exit 7: the files are back, the old server is not; the lines that start it are there (atomic-host-tests#155)."""
    good, _ = push(host, server)
    before = tree(server)
    (server.folder / "broken").touch()

    error = failed(replace(host, health=server.health(1.5)), server, RollbackIncompleteError, mark="2")

    assert error.exit_code == 7
    assert "its files were put back, but the server does not come up with d-0001" in error.what
    parts = error.why.split("; ")
    assert len(set(parts)) == len(parts) and parts[-1].startswith(("d-0001: after waiting", "the restart said")), parts
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
