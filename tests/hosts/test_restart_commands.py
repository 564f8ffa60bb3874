# SPDX-License-Identifier: Apache-2.0
"""Restart commands that restart nothing, something else, or fail, and a unit that systemd gave up."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.servers import Server
from tests.support.trees import differences
from tests.support.trials import (
    command_lines,
    failed,
    history,
    push,
    states,
    tree,
)
from tests.support.waiting import AGES, HANG, until

from ddtree_overlay.config import Host
from ddtree_overlay.errors import (
    RollbackIncompleteError,
    RolledBackError,
)


#: Nobody else's on this machine.
SLEEP = f"sleep {AGES}.{os.getpid()}"


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
        (("sh", "-c", f"trap '' TERM; {SLEEP} & {SLEEP}"), "did not end in time; it was killed"),
        (("sh", "-c", "kill -9 $$"), "ended with signal 9"),
    ],
    ids=["fails", "hangs", "killed"],
)
def test_a_restart_command_that_fails_or_hangs_is_rolled_back(
    host: Host, server: Server, command: tuple[str, ...], says: str
):
    """The old server was not touched, so the files go back and it serves on; what the command said is shown."""
    before, pid = tree(server), server.info()["pid"]

    hangs = SLEEP in command[-1]
    error = failed(replace(host, restart=command, restart_timeout=0.5 if hangs else HANG), server, RolledBackError)

    assert says in error.what
    assert "hush-hush" not in str(error)
    assert ("--api-key ***" in error.why) == ("exit 5" in command[-1])
    assert differences(before, tree(server)) == []
    assert server.info()["pid"] == pid
    assert states(host) == [("d-0001", "pending", False, True)]
    if hangs:
        sleep = b"\0".join(map(str.encode, SLEEP.split()))
        # What the command had started does not run on.
        until(lambda: not any(sleep in c for c in command_lines()))


def test_a_restart_that_stops_the_server_and_fails_has_tried_the_new_code(host: Host, server: Server):
    """Nothing serves any more: going back needs the same restart, and when that fails too the host needs a person."""
    before = tree(server)
    there = "$(tr -d '\\0' < /proc/$pid/cmdline 2>/dev/null)"
    gone = f'while [ -n "{there}" ]; do sleep 0.1; done'
    stop = (
        "sh",
        "-c",
        f"pid=$(cat {server.folder}/pid); kill $pid; {gone}; exit 5",
    )

    error = failed(replace(host, restart=stop, health=server.health(1.0)), server, RollbackIncompleteError)

    assert "does not come up with base" in error.what and "exit status 5" in error.why
    assert "kill $pid" in error.next_step, "the manual lines are the restart command"
    assert differences(before, tree(server)) == []
    assert states(host) == [("d-0001", "bad", False, True)]


def test_a_unit_that_systemd_gave_up_is_reset_before_it_is_started_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
):
    """A crashing overlay uses up the unit's starts; without reset-failed the rollback's restart would be refused too.

    microduck#143, omp-session-gateway#115.
    """
    monkeypatch.setenv("PATH", f"{server.folder / 'bin'}:{os.environ['PATH']}")
    unit = server.install.host(
        "gpu", restart_unit="sglang.service", restart_timeout=HANG, health=server.health(2 * HANG)
    )
    good, _ = push(unit, server)
    before = tree(server)

    error = failed(unit, server, RolledBackError, "crash")

    # Which is not waited for any longer: after that time it would not be said.
    assert "no server came up: systemd has given sglang.service up" in error.what
    assert differences(before, tree(server)) == []
    assert server.info()["speculative_ddtree_overlay_id"] == good.overlay_id
    said = [line for line in (server.folder / "systemctl.log").read_text().splitlines() if "is-failed" not in line]
    assert said[-2:] == ["reset-failed sglang.service", "restart sglang.service"]
