# SPDX-License-Identifier: Apache-2.0
"""Patience: a healthy agent is waited for, and one that changes files is never killed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tests.support.installs import bundle_for
from tests.support.waiting import patience, timed, until

from ddtree_overlay import deploy
from ddtree_overlay.errors import ConnectionFailedError, LockedError
from ddtree_overlay.hosts import protocol
from ddtree_overlay.hosts.transport import open_transport
from ddtree_overlay.remote import agent


RESULTS = {"srt/a.py": b"VALUE = 5\n"}


@pytest.fixture
def lock(tiny):
    """A lock that another process holds on `tiny`."""
    tiny.state.mkdir()
    code = (
        "import fcntl, json, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX);"
        f"f.write({json.dumps({'pid': 4711, 'operator': 'ann', 'doing': 'push', 'since': 0})!r}); f.flush();"
        "print('held', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, tiny.state / "lock"], stdout=subprocess.PIPE) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == b"held\n"
        yield
        holder.kill()


@pytest.mark.usefixtures("lock")
def test_a_healthy_push_outlasts_a_short_timeout(tiny, near):
    """`--timeout` is about silence: an agent that works for longer shows signs of life within any of it."""
    bundle, files = bundle_for(tiny.root, RESULTS)
    plan, took = timed(lambda: deploy.plan_push(near, bundle, files))
    # An agent that cannot even start within the time is silent all right.
    short = patience(1.0, took)
    with open_transport(tiny.host(timeout=short)) as impatient, pytest.raises(LockedError):
        deploy.push(impatient, plan, files, operator="x", lock_wait=2 * short)


def test_a_local_agent_that_changes_files_is_left_to_finish(tiny, near, tmp_path):
    """No SIGKILL in a swap: the push is given up on this side, said to go on, and does."""
    slow = tmp_path / "python"
    waits = f"cat > {tmp_path}/request\nuntil [ -e {tmp_path}/go ]; do sleep 0.1; done"
    slow.write_text(f'#!/bin/sh\n{waits}\nexec {tiny.python} "$@" < {tmp_path}/request\n')
    slow.chmod(0o755)
    bundle, files = bundle_for(tiny.root, RESULTS)
    plan = deploy.plan_push(near, bundle, files)
    with (
        open_transport(tiny.host(python=str(slow), timeout=0.7)) as impatient,
        pytest.raises(ConnectionFailedError, match="may still finish"),
    ):
        # A request that fits into the pipe is there as a whole, before anybody reads it.
        deploy.push(impatient, plan, files, operator="x")
    assert deploy.status(near).state == "pristine"
    (tmp_path / "go").touch()
    until(lambda: deploy.status(near).state == "applied")


def test_both_sides_agree_on_what_changes_files():
    """An operation that one side would cut off and the other would finish is a half-made change."""
    assert protocol.MUTATING == agent.MUTATING
