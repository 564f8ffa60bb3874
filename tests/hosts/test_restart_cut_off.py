# SPDX-License-Identifier: Apache-2.0
"""A trial that does not end as it should: a way back that fails, a client or an agent that is gone, a second pusher."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import replace

import pytest
from tests.support.servers import Server
from tests.support.sshd import SshServer, kill_sessions
from tests.support.trees import differences
from tests.support.trials import (
    ended,
    failed,
    in_background,
    kill_agents,
    phase,
    push,
    states,
    tree,
    trial,
)
from tests.support.waiting import AGES, until

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
    by_hand, here = error.next_step.split("\n# here:\n")
    assert by_hand.startswith("# on the host:\n")
    assert here == "ddtree-overlay status --host gpu"
    ran = subprocess.run(["sh", "-c", by_hand.replace("curl -fsS", "true")], check=False, capture_output=True)
    assert ran.returncode == 0, ran.stderr
    server.runs(good.overlay_id)


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
    until(lambda: phase(server) == ("d-0002", "the server was waited for"))

    kill_sessions(sshd)
    ended(thread, server)

    assert states(host) == [("d-0001", "good", True, False), ("d-0002", "bad", False, True)]
    assert differences(before, tree(server)) == []
    assert server.info()["speculative_ddtree_overlay_id"] == good.overlay_id
    assert trial(server) == {}


def test_a_second_pusher_is_refused_while_a_server_is_waited_for(host: Host, server: Server):
    """The lock is held through the restart and the health check (kamal#1930)."""
    thread = in_background(replace(host, health=server.health(AGES)), server, "dumb")
    until(lambda: phase(server) == ("d-0001", "the server was waited for"))

    with open_transport(host) as transport:
        found = deploy.status(transport)
    assert found.unfinished.startswith("alice is running a push with a restart here")
    with pytest.raises(LockedError, match=r"alice .* has been running a push with a restart here"):
        push(host, server, mark="second")

    (server.folder / "awake").touch()
    ended(thread, server)
    assert states(host) == [("d-0001", "good", True, False)]


@pytest.mark.parametrize(
    ("name", "at", "state", "kept"),
    [
        ("d-0001", "the server was restarted", "applied", ("d-0001", "pending", True, False)),
        ("d-0001", "the server was waited for", "applied", ("d-0001", "pending", True, False)),
        ("base", "the server was restarted", "pristine", ("d-0001", "bad", False, True)),
        ("base", "the server was waited for", "pristine", ("d-0001", "bad", False, True)),
    ],
)
def test_an_agent_that_is_killed_leaves_a_state_that_says_what_to_do(
    host: Host, server: Server, *, name: str, at: str, state: str, kept: tuple[str, str, bool, bool]
):
    """kill -9 in each phase: all files or none, the next contact sees how far it came, and the next push heals it."""
    # Told which overlay it is for; the one that the agent is killed in does not end before.
    held = f"echo $$ > {server.folder}/restarting; exec sleep {AGES}"
    script = server.folder / "script"
    stands_still = f'[ -{"z" if name == "base" else "n"} "$DDTREE_OVERLAY_ID" ]' if "restarted" in at else "false"
    script.write_text(f"#!/bin/sh\nif {stands_still}; then {held}; fi\nexec {server.restart[0]}\n")
    script.chmod(0o755)
    if name == "base":
        # Neither the new state nor the old one comes up.
        (server.folder / "broken").touch()
    health = server.health(2.0 if name == "base" else AGES)
    thread = in_background(replace(host, restart=(str(script),), restart_timeout=AGES, health=health), server, "dumb")
    until(lambda: phase(server) == (name, at))
    if "restarted" in at:
        until((server.folder / "restarting").exists)
    kill_agents(server)
    if "restarted" in at:
        os.kill(int((server.folder / "restarting").read_text()), signal.SIGKILL)
    ended(thread, server)

    with open_transport(host) as transport:
        found = deploy.status(transport)
    text = "\n".join(plain(line) for line in status_lines(found))
    assert (found.state, found.unfinished, states(host)) == (state, "", [kept])
    assert f"the trial of {name} was cut off while {at}" in text
    assert ("ddtree-overlay push --host gpu --restart" in text) == (state == "applied")

    (server.folder / "broken").unlink(missing_ok=True)
    done, proof = push(host, server, mark="healing")
    assert (done.state, proof.ok, trial(server)) == ("good", True, {})
