# SPDX-License-Identifier: Apache-2.0
"""An operation that ends in the middle: the next contact finds the journal, says so, and puts everything back.

The agent's modules are run from memory as on a host, with one function replaced by one that ends the process.
"""

from __future__ import annotations

import subprocess

import pytest
from tests.support.agents import FULL, sabotaged
from tests.support.installs import bundle_for
from tests.support.trees import differences, listing
from tests.support.waiting import HANG

from ddtree_overlay import deploy
from ddtree_overlay.errors import ConnectionFailedError, OverlayError, RolledBackError
from ddtree_overlay.hosts import protocol
from ddtree_overlay.hosts.transport import open_transport


RESULTS = {"srt/a.py": b"VALUE = 5\n", "srt/b.py": b"VALUE = 6\n", "srt/new/c.py": b"C = 1\n"}


def push_of(transport, tiny):
    bundle, files = bundle_for(tiny.root, RESULTS)
    return lambda: deploy.push(transport, deploy.plan_push(transport, bundle, files), files, operator="x")


#: Where the real bootstrap is killed; every single step is gone through in test_crashes.py.
STEPS = [("swap", "put", 1), ("swap", "put", 3), ("swap", "drop_bytecode", 2), ("transaction", "_prepare", 1)]


@pytest.mark.parametrize("step", STEPS, ids=lambda s: "-".join(map(str, s)))
def test_a_killed_push_is_put_back_at_the_next_contact(tiny, near, monkeypatch, step):
    """`kill -9` in the middle: status says so and writes nothing; the next rollback finds the tree as before."""
    tiny.run("import sglang.srt.a, sglang.srt.b")
    before = listing(tiny.root)
    with (
        sabotaged(monkeypatch, *step),
        pytest.raises(ConnectionFailedError, match=r"(?s)terminated by a signal.*put back by"),
    ):
        push_of(near, tiny)()
    middle = listing(tiny.site)
    found = deploy.status(near)
    journal = (tiny.state / "journal.json").exists()
    assert ("was interrupted" in found.unfinished, found.state) == (journal, "partial" if journal else "pristine")
    assert differences(middle, listing(tiny.site)) == []
    deploy.rollback(near)
    assert differences(before, listing(tiny.root)) == []
    assert not (tiny.state / "journal.json").exists()
    assert not list(tiny.root.rglob("*.ddtree-tmp"))


def test_a_push_after_a_killed_push_recovers_first(tiny, near, monkeypatch):
    """The plan already counts with the recovery, so the push goes through at once."""
    push = push_of(near, tiny)
    with sabotaged(monkeypatch, "swap", "put", 2), pytest.raises(ConnectionFailedError):
        push()
    done = push()
    assert (done.id, done.current) == ("d-0002", True)
    assert {p: (tiny.root / p).read_bytes() for p in RESULTS} == RESULTS
    assert [(d.id, d.state) for d in deploy.history(near)] == [("d-0001", "bad"), ("d-0002", "pending")]


def test_a_push_killed_after_its_commit_counts(tiny, near, monkeypatch):
    """Once the history has its line the push is done; only tidying is left."""
    with sabotaged(monkeypatch, "store", "clear_journal", 2), pytest.raises(ConnectionFailedError):
        push_of(near, tiny)()
    deploy.rollback(near, to="d-0001")
    assert {p: (tiny.root / p).read_bytes() for p in RESULTS} == RESULTS
    assert deploy.status(near).state == "applied"


def test_a_history_that_a_line_was_taken_out_of_does_not_hide_an_interruption(tiny, near, monkeypatch):
    """As the message about a damaged line advises; a push that is killed afterwards is no older one that was whole."""
    for value in (5, 6, 7):
        bundle, files = bundle_for(tiny.root, {"srt/a.py": b"VALUE = %d\n" % value})
        deploy.push(near, deploy.plan_push(near, bundle, files), files, operator="x")
    history = tiny.state / "history.jsonl"
    first, _, last = history.read_bytes().splitlines(keepends=True)
    history.write_bytes(first + b"\0garbage\n" + last)
    with pytest.raises(OverlayError, match="damaged") as caught:
        deploy.status(near)
    subprocess.run(str(caught.value.next_step).splitlines()[0], shell=True, check=True)
    before = listing(tiny.root)

    with sabotaged(monkeypatch, "swap", "put", 2), pytest.raises(ConnectionFailedError):
        push_of(near, tiny)()

    assert "was interrupted" in deploy.status(near).unfinished
    deploy.rollback(near, to="d-0003")
    assert differences(before, listing(tiny.root)) == []


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_killed_rollback_is_put_back_too(tiny, near, monkeypatch, count):
    """After recovery the overlay is whole again, and the rollback can be run once more."""
    before = listing(tiny.root)
    push_of(near, tiny)()
    applied = listing(tiny.root)
    with sabotaged(monkeypatch, "swap", "drop_bytecode", count), pytest.raises(ConnectionFailedError):
        deploy.rollback(near)
    push_of(near, tiny)
    deploy.rollback(near, to="d-0001")
    assert differences(applied, listing(tiny.root)) == []
    deploy.rollback(near, purge=True)
    assert differences(before, listing(tiny.root)) == []


def test_a_disk_that_fills_up_in_the_middle_is_rolled_back(tiny, near, monkeypatch):
    """Exit code 6 with the cause; every file is as before (Osmantic/ODS#1279 would have gone on)."""
    before = listing(tiny.root)
    with (
        sabotaged(monkeypatch, "swap", "put", 3, FULL),
        pytest.raises(RolledBackError, match="everything was put back") as caught,
    ):
        push_of(near, tiny)()
    assert caught.value.exit_code == 6
    assert "No space left on device" in caught.value.why
    assert differences(before, listing(tiny.root)) == []
    assert deploy.status(near).state == "pristine"
    assert [d.state for d in deploy.history(near)] == ["bad"]


def test_a_push_that_fails_before_its_journal_leaves_nothing(tiny, near, monkeypatch):
    """No state folder, no backup: as if it had not been tried."""
    before = listing(tiny.site)
    with sabotaged(monkeypatch, "transaction", "keep_in", 1, FULL), pytest.raises(Exception, match="No space left"):
        push_of(near, tiny)()
    assert differences(before, listing(tiny.site)) == []


def test_a_torn_line_at_the_end_of_the_history_never_happened(tiny, near):
    """A crash while the line was written: it does not count, and the next event does not stick to it."""
    push_of(near, tiny)()
    with (tiny.state / "history.jsonl").open("ab") as stream:
        stream.write(b'{"event": "push", "id": "d-00')
    assert deploy.status(near).deployment.id == "d-0001"
    deploy.rollback(near)
    assert [d.undone is None for d in deploy.history(near)] == [False]


def test_the_agent_goes_on_when_its_client_is_gone(tiny, tmp_path):
    """A push whose client is killed right after sending is finished by the agent alone."""
    del tmp_path
    bundle, files = bundle_for(tiny.root, RESULTS)
    with open_transport(tiny.host()) as transport:
        plan = deploy.plan_push(transport, bundle, files)
    changes = [
        {"path": c.path, "base": c.base_sha256, "after": c.sha256, "size": len(files[c.path])} for c in bundle.changes
    ]
    args = {
        "changes": changes,
        "expect": [[a.path, a.live_sha256, a.sha256] for a in plan.actions],
        "operator": "gone",
        "lock_wait": 0,
        "overlay_id": plan.overlay_id,
        "base_id": plan.base_id,
        "release": plan.release,
    }
    request = protocol.encode("push", args, b"".join(files[c.path] for c in bundle.changes))
    words = [tiny.python, "-c", protocol.BOOTSTRAP, "mark"]
    child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdin
    assert child.stdout
    assert child.stderr
    child.stdin.write(request)
    child.stdin.close()
    child.stdout.close()
    child.stderr.close()
    assert child.wait(timeout=HANG) == 0
    with open_transport(tiny.host()) as transport:
        assert deploy.status(transport).state == "applied"
