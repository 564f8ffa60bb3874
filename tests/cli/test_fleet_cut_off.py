# SPDX-License-Identifier: Apache-2.0
"""A push to several hosts that is killed, interrupted or cut off leaves no mixture, or says where."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

from tests.support.commands import clean_environ
from tests.support.fleets import FULL, KILLED, SLOW, lines
from tests.support.relay import Relay

from ddtree_overlay.hosts import hostkeys


def test_an_agent_that_is_killed_is_put_back_by_the_same_command(run, three):
    """`kill -9` of b's agent in the middle: its journal is undone at the next contact, which is the undo itself."""
    armed = three["b"].sabotage(f"pathlib.Path({{arm!r}}).unlink(); {KILLED}")
    done = run("push", "--group", "gpu", "--yes")
    assert done.code == 6, done.err
    assert not armed.exists()
    assert {n: m.changed() + m.left() for n, m in three.items()} == {n: [] for n in "abc"}
    assert "every host is as it was before" in done.out


def test_a_connection_that_is_lost_leaves_no_host_behind(three, workspace, tmp_path):
    """b is cut off for a second while its agent goes on and commits: it is reached again and rolled back.

    Nobody can know from here what became of a swap whose answer was lost (borgstore#189).
    """
    three["b"].sabotage(SLOW)
    with Relay(three["b"].server.port) as relay:
        cut_through(workspace, three["b"], relay)
        child = start(workspace, tmp_path, "push", "--group", "gpu", "--yes", "--json")
        wait_for(three["b"].busy)
    time.sleep(1)
    with Relay(three["b"].server.port, listen=relay.port):
        out, err = child.communicate(timeout=60)
    assert child.returncode == 6, err
    assert {h["host"]: h["fate"] for h in json.loads(out)["hosts"]} == dict.fromkeys("abc", "undone")
    assert "b: rolled back to base, every file verified" in err
    assert {n: m.changed() + m.left() for n, m in three.items()} == {n: [] for n in "abc"}


def test_a_host_that_does_not_come_back_is_named_with_what_to_do(run, three, workspace, tmp_path):
    """b is cut off for good, with the new overlay: exit 7, not known, and the advised commands work once it is back."""
    three["b"].sabotage(SLOW)
    relay = Relay(three["b"].server.port)
    cut_through(workspace, three["b"], relay)
    with relay:
        child = start(workspace, tmp_path, "push", "--group", "gpu", "--yes", "--timeout", "2")
        wait_for(three["b"].busy)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 7, err
    assert "gpu: FAILED, and not as before on b\n" in out
    assert lines(out)["b"][1:4] == ["NOT", "KNOWN", "?"]
    assert three["a"].changed() == three["c"].changed() == []
    assert "ddtree-overlay status --host b, then ddtree-overlay rollback --host b --to base" in err
    with Relay(three["b"].server.port, listen=relay.port):
        assert run("status", "--host", "b").out.startswith("b  applied")
        assert run("rollback", "--host", "b", "--to", "base", "--yes").code == 0
    assert three["b"].changed() == []


def test_two_pushes_to_the_same_hosts_never_leave_a_mixture(run, three, workspace, tmp_path):
    """They may both give up, but never half: all hosts have the overlay if one says so, and none has it otherwise."""
    both = [start(workspace, tmp_path, "push", "--group", "gpu", "--yes") for _ in range(2)]
    said = [child.communicate(timeout=60) for child in both]
    codes = [child.returncode for child in both]
    assert set(codes) <= {0, 4, 5, 6}, said
    found = run("status", "--group", "gpu", "--exit-code", "--json")
    assert (found.code, found.json["overlay_id"] is not None) == (0, 0 in codes), said
    assert {n: m.left() for n, m in three.items()} == {n: [] for n in "abc"}


def cut_through(workspace, machine, relay):
    """Let the configuration reach `machine` through `relay`."""
    pin = hostkeys.fingerprint(hostkeys.parse(machine.server.known_hosts.read_text(), "x")[0][0].blob)
    text = (workspace / "deploy.toml").read_text()
    through = f'port = {relay.port}\nhost_key_fingerprint = "{pin}"\n'
    (workspace / "deploy.toml").write_text(text.replace(f"port = {machine.server.port}\n", through))


def test_ctrl_c_ends_what_has_begun_and_puts_it_back(three, workspace, tmp_path):
    """SIGINT while b is being swapped: it is waited for, all three are as before, and the exit code is 130."""
    three["b"].sabotage(SLOW)
    child = start(workspace, tmp_path, "push", "--group", "gpu", "--yes")
    wait_for(three["b"].busy)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    assert "gpu: interrupted; every host is as it was before" in out
    assert "interrupted; waiting for what has begun" in err
    assert {n: m.changed() + m.left() for n, m in three.items()} == {n: [] for n in "abc"}


def test_a_host_that_cannot_be_put_back_is_named_with_the_way_back(run, three):
    """b fails and a's way back fails too: exit 7, c is as before, a's commands are printed (atomic-host-tests#155)."""
    three["a"].sabotage("if open(target).read() == 'VALUE = 6\\n': raise OSError(5, 'Input/output error')")
    three["b"].sabotage(FULL)
    done = run("push", "--group", "gpu", "--yes")
    assert done.code == 7, done.err
    assert "gpu: FAILED, and not as before on a\n" in done.out
    assert lines(done.out)["a"][1:4] == ["NOT", "PUT", "BACK"]
    assert "next: ddtree-overlay status --host a, then ddtree-overlay rollback --host a --to base" in done.err
    assert three["b"].changed() == three["c"].changed() == []
    assert run("status", "--group", "gpu", "--exit-code").out.startswith("gpu: SKEW")
    (three["a"].install.site / "sitecustomize.py").unlink()
    assert run("rollback", "--host", "a", "--to", "base", "--yes").code == 0
    assert three["a"].changed() == []


def start(workspace, tmp_path, *words):
    """The command line as a process that goes on."""
    return subprocess.Popen(
        [sys.executable, "-m", "ddtree_overlay", *words],
        cwd=workspace,
        env=clean_environ(tmp_path / "home"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(path, seconds=20):
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.02)
