# SPDX-License-Identifier: Apache-2.0
"""A push to several hosts that is killed, interrupted or cut off leaves no mixture, or says where."""

from __future__ import annotations

import signal

from tests.support.commands import begin, heard, outcome
from tests.support.fleets import FULL, KILLED, lines
from tests.support.relay import Relay
from tests.support.waiting import patience, timed

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
    """b is cut off for a moment while its agent goes on and commits: it is reached again and rolled back.

    Nobody can know from here what became of a swap whose answer was lost (borgstore#189).
    """
    three["b"].stop_in_the_middle()
    with Relay(three["b"].server.port) as relay:
        cut_through(workspace, three["b"], relay)
        child = begin(workspace, tmp_path / "home", "push", "--group", "gpu", "--yes", "--json")
        three["b"].wait_until_busy()
    three["b"].go_on()
    three["b"].wait_until_idle()
    with Relay(three["b"].server.port, listen=relay.port):
        done = outcome(child)
    assert done.code == 6, done.err
    assert {h["host"]: h["fate"] for h in done.json["hosts"]} == dict.fromkeys("abc", "undone")
    assert "b: rolled back to base, every file verified" in done.err
    assert {n: m.changed() + m.left() for n, m in three.items()} == {n: [] for n in "abc"}


def test_a_host_that_does_not_come_back_is_named_with_what_to_do(run, three, workspace, tmp_path):
    """b is cut off for good, with the new overlay: exit 7, not known, and the advised commands work once it is back."""
    three["b"].stop_in_the_middle()
    _, took = timed(lambda: run("status", "--group", "gpu"))
    relay = Relay(three["b"].server.port)
    cut_through(workspace, three["b"], relay)
    # So long b is asked for, and so long a and c may be silent at any one step.
    timeout = str(patience(5.0, took / 4))
    with relay:
        child = begin(workspace, tmp_path / "home", "push", "--group", "gpu", "--yes", "--timeout", timeout)
        three["b"].wait_until_busy()
    three["b"].go_on()
    done = outcome(child)
    assert done.code == 7, done.err
    assert "gpu: FAILED, and not as before on b\n" in done.out
    assert lines(done.out)["b"][1:4] == ["NOT", "KNOWN", "?"]
    assert three["a"].changed() == three["c"].changed() == []
    assert "ddtree-overlay status --host b, then ddtree-overlay rollback --host b --to base" in done.err
    with Relay(three["b"].server.port, listen=relay.port):
        assert run("status", "--host", "b").out.startswith("b  applied")
        assert run("rollback", "--host", "b", "--to", "base", "--yes").code == 0
    assert three["b"].changed() == []


def test_two_pushes_to_the_same_hosts_never_leave_a_mixture(run, three, workspace, tmp_path):
    """They may both give up, but never half: all hosts have the overlay if one says so, and none has it otherwise."""
    both = [begin(workspace, tmp_path / "home", "push", "--group", "gpu", "--yes") for _ in range(2)]
    said = [outcome(child) for child in both]
    codes = [done.code for done in said]
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
    three["b"].stop_in_the_middle()
    child = begin(workspace, tmp_path / "home", "push", "--group", "gpu", "--yes")
    three["b"].wait_until_busy()
    child.send_signal(signal.SIGINT)
    said = heard(child, "interrupted; waiting for what has begun")
    three["b"].go_on()
    done = outcome(child, said)
    assert done.code == 130, done.err
    assert "gpu: interrupted; every host is as it was before" in done.out
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
