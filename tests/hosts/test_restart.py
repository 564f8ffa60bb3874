# SPDX-License-Identifier: Apache-2.0
"""Push with a restart: against a real HTTP server that imports the installed tree, over a real sshd."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.servers import Server
from tests.support.trees import differences
from tests.support.trials import (
    failed,
    push,
    states,
    tree,
)
from tests.support.waiting import HANG, until

from ddtree_overlay import deploy
from ddtree_overlay.config import Host
from ddtree_overlay.errors import (
    OverlayError,
    RolledBackError,
)
from ddtree_overlay.hosts.transport import open_transport
from ddtree_overlay.remote.asking import ask


def test_a_push_whose_server_comes_up_with_the_overlay_is_good(host: Host, server: Server):
    """Pushed, restarted, and proven by what the live server reports and by a token that it makes (Hyperloom#516)."""
    old, lines = server.info()["pid"], []
    held = server.folder / "held"
    held.touch()

    def tell(line: str) -> None:
        lines.append(line)
        if "waiting for overlay" in line:
            held.unlink(missing_ok=True)

    done, proof = push(host, server, tell=tell)

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


def test_an_ignored_signal_is_not_handed_down_to_the_server(host: Host, server: Server):
    """The agent ignores SIGTERM; a server that inherited this could never be ended again."""
    push(host, server)

    pid = server.info()["pid"]
    status = Path(f"/proc/{pid}/status").read_text()
    ignored = int(re.search(r"SigIgn:\t(\w+)", status)[1], 16)
    assert not any(ignored >> (number - 1) & 1 for number in (signal.SIGHUP, signal.SIGTERM))


def test_a_server_with_an_api_key_is_asked_with_the_key_that_lies_on_its_host(
    host: Host, server: Server, tmp_path: Path
):
    """The key stays on the host: deploy.toml names a file there."""
    key = tmp_path / "key"
    key.write_text("open sesame\n")
    script = server.folder / "keyed"
    script.write_text(f"#!/bin/sh\nKEY='open sesame' exec {server.restart[0]}\n")
    script.chmod(0o755)
    subprocess.run([script], check=True, timeout=HANG)
    locked = replace(host, restart=(str(script),))
    # What tells its algorithm without the key is the old server.
    until(lambda: ask(server.url).kind == "denied")

    error = failed(locked, server, OverlayError)
    done, _ = push(replace(locked, health=server.health(api_key_file=str(key))), server)

    assert "wants an API key (401)" in error.what and "api_key_file" in error.next_step
    assert (done.id, done.state) == ("d-0001", "good")
