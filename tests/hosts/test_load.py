# SPDX-License-Identifier: Apache-2.0
"""Many operators at once, many rounds, and operators that vanish: nothing is left over, and nobody waits for ever."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.agents import logged
from tests.support.crashes import Direct
from tests.support.installs import bundle_for, tiny_package
from tests.support.sshd import kill_sessions, sessions_of
from tests.support.trees import differences, listing
from tests.support.waiting import HANG, no_hang, until

from ddtree_overlay import deploy
from ddtree_overlay.errors import ConflictError, LockedError
from ddtree_overlay.hosts.transport import open_transport
from ddtree_overlay.remote import lock, preflight, pruning
from ddtree_overlay.remote.common import Refusal


#: Well within the 900 seconds that pytest gives a test.
DEADLINE = 250


def test_eight_operators_at_once_are_served_one_after_the_other(tiny, sshd, monkeypatch, tmp_path):
    """Each gets its overlay in; no two swaps overlap, the history is one chain, nobody hangs (kamal#1930)."""
    pristine = tmp_path / "pristine"
    shutil.copytree(tiny.root, pristine)
    log = tmp_path / "log"
    host = sshd.host(python=str(tiny.python))

    def operator(number):
        results = {"srt/a.py": b"VALUE = %d\n" % (10 + number), f"srt/new/m{number}.py": b"M = 1\n"}
        bundle, files = bundle_for(pristine, results)
        with open_transport(host) as transport:
            while True:
                try:
                    plan = deploy.plan_push(transport, bundle, files)
                    return deploy.push(transport, plan, files, operator=f"op{number}", lock_wait=DEADLINE).id
                except ConflictError:
                    # Somebody else was faster, as the plan says: plan anew.
                    assert time.monotonic() < deadline

    deadline = time.monotonic() + DEADLINE
    with logged(monkeypatch, "transaction", "run", log), ThreadPoolExecutor(8) as pool:
        names = list(pool.map(operator, range(8)))
    assert sorted(names) == [f"d-{n:04d}" for n in range(1, 9)]
    lines = log.read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["begin", "end"] * 8
    assert all(a.split()[1] == b.split()[1] for a, b in zip(lines[::2], lines[1::2], strict=True))
    events = [json.loads(line) for line in (tiny.state / "history.jsonl").read_text().splitlines()]
    assert [e["before"] for e in events] == [None, *(e["current"] for e in events[:-1])]
    assert [e["txn"] for e in events] == list(range(8))
    with open_transport(host) as transport:
        assert deploy.status(transport).state == "applied"
        assert deploy.rollback(transport, to="base", purge=True).undone == tuple(sorted(names, reverse=True))
    assert differences(listing(pristine), listing(tiny.root)) == []


def test_two_hundred_rounds_leave_nothing_behind(tmp_path):
    """Push and rollback, over and over: the tree is the same each time, and the state folder stops growing."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        site = Path(folder, "site")
        tiny_package(site, "0.5.11")
        before, sizes = listing(site), []
        bundle, files = bundle_for(site / "sglang", {"srt/a.py": b"VALUE = 5\n", "srt/new/c.py": b"C = 1\n"})
        near = Direct(str(site / "sglang"))
        descriptors = len(os.listdir("/proc/self/fd"))
        for number in range(1, 201):
            done = deploy.push(near, deploy.plan_push(near, bundle, files), files, operator="x")
            assert done.id == f"d-{number:04d}"
            deploy.rollback(near)
            sizes.append(sum(len(names) for _, _, names in os.walk(site)))
        state = site / ".ddtree-overlay"
        # Connections of earlier tests may be closed meanwhile.
        assert len(os.listdir("/proc/self/fd")) <= descriptors
        assert sizes[2 * pruning.KEEP] == sizes[-1] == max(sizes)
        assert sorted(os.listdir(state)) == ["deployments", "history.jsonl", "lock"]
        assert len(os.listdir(state / "deployments")) <= 2 * pruning.KEEP + 1
        assert [d.id for d in deploy.history(near)] == [f"d-{n:04d}" for n in range(1, 201)]
        deploy.rollback(near, purge=True)
        assert differences(before, listing(site)) == []


def test_whoever_looks_keeps_nobody_from_the_lock(tmp_path):
    """Status asks who holds the lock a thousand times a second; a push that does not wait gets it every time."""
    folder = tmp_path / "state"
    with lock.held(folder, "x", "push", 0):
        pass
    code = (
        "import os, sys; from pathlib import Path; from ddtree_overlay.remote import lock;"
        "parent = os.getppid(); print('ready', flush=True)\n"
        "while os.getppid() == parent: lock.holder(Path(sys.argv[1]))"
    )
    watchers = [subprocess.Popen([sys.executable, "-c", code, folder], stdout=subprocess.PIPE) for _ in range(2)]
    for watcher in watchers:
        assert watcher.stdout is not None
        assert watcher.stdout.readline() == b"ready\n"
    try:
        for _ in range(200):
            with lock.held(folder, "x", "push", 0):
                assert lock.holder(folder)["operator"] == "x"
    finally:
        for watcher in watchers:
            watcher.kill()
            watcher.wait()


def test_a_holder_without_a_name_is_told_as_that(tmp_path):
    """The lock was taken a moment ago, or the disk has no room for a name: nothing is made up."""
    (tmp_path / "lock").touch()
    with (tmp_path / "lock").open("r+b") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with (
            pytest.raises(Refusal, match=r"^somebody \(pid unknown\) has been running a deployment here$"),
            lock.held(tmp_path, "x", "push", 0),
        ):
            pass


def test_a_lock_that_was_removed_protects_nothing(tmp_path):
    """Whoever waited for a lock whose folder was purged meanwhile takes a new one (deployer lock)."""
    folder = tmp_path / "state"
    for _ in range(3):
        with lock.held(folder, "x", "purge", 0) as protected:
            assert protected()
            shutil.rmtree(folder)
            assert not protected()
            with lock.held(folder, "y", "push", 0):
                assert lock.holder(folder)["operator"] == "y"


#: Loaded by every interpreter of the environment: holds an agent at its second rename in the package until told to go.
PAUSE = """
import os, sys, time
folder, root = {folder!r}, {root!r}
left = [2]
def hook(event, args):
    if event == "os.rename" and str(args[1]).startswith(root) and os.path.exists(folder + "/armed"):
        left[0] -= 1
        if not left[0]:
            open(folder + "/paused", "w").close()
            end = time.monotonic() + 600
            while not os.path.exists(folder + "/go") and time.monotonic() < end:
                time.sleep(0.02)
if "-c" in sys.orig_argv:
    sys.addaudithook(hook)
"""
#: The operator's side of a push, to be killed.
CLIENT = """
import pickle, sys
from ddtree_overlay import deploy
from ddtree_overlay.hosts.transport import open_transport
host, bundle, files = pickle.load(open(sys.argv[1], "rb"))
with open_transport(host) as transport:
    deploy.push(transport, deploy.plan_push(transport, bundle, files), files, operator="ann@desk")
"""
RESULTS = {"srt/a.py": b"VALUE = 5\n", "srt/b.py": b"VALUE = 6\n", "srt/new/c.py": b"C = 1\n"}


class Push:
    """A push in a process of its own over SSH, whose agent stands still in the middle of the swap."""

    def __init__(self, tiny, sshd, folder):
        self.folder = folder / "pause"
        self.folder.mkdir()
        (tiny.site / "pause.py").write_text(PAUSE.format(folder=str(self.folder), root=str(tiny.root)))
        (tiny.site / "pause.pth").write_text("import pause\n")
        (self.folder / "armed").touch()
        self.host = sshd.host(python=str(tiny.python))
        bundle, files = bundle_for(tiny.root, RESULTS)
        (folder / "push").write_bytes(pickle.dumps((self.host, bundle, files)))
        self.client = subprocess.Popen([sys.executable, "-c", CLIENT, folder / "push"], stderr=subprocess.DEVNULL)
        until((self.folder / "paused").exists)
        (self.folder / "armed").unlink()
        self.agent = lock.holder(tiny.state)["pid"]

    def kill_client(self):
        self.client.kill()
        self.client.wait()

    def go(self):
        """Let the agent go on, and wait for its end."""
        (self.folder / "go").touch()
        until(lambda: not os.path.exists(f"/proc/{self.agent}"))


@pytest.fixture
def push(tiny, sshd, tmp_path):
    made = Push(tiny, sshd, tmp_path)
    yield made
    (made.folder / "go").touch()
    made.kill_client()


def test_an_agent_whose_client_was_killed_finishes_alone(tiny, push):
    """`kill -9` of the operator's process in the middle: meanwhile status and a second push tell who is at work."""
    push.kill_client()
    with open_transport(push.host) as transport:
        found = deploy.status(transport)
        assert found.state == "partial"
        assert found.unfinished == f"ann@desk is running a push here (pid {push.agent})"
        with pytest.raises(LockedError, match=r"ann@desk \(pid \d+\) has been running a push here") as caught:
            deploy.rollback(transport, to="base", operator="bob")
        assert caught.value.exit_code == 5
        push.go()
        assert deploy.status(transport).state == "applied"
        assert [d.state for d in deploy.history(transport)] == ["pending"]
    assert {p: (tiny.root / p).read_bytes() for p in RESULTS} == RESULTS


def test_an_agent_whose_session_was_killed_finishes_alone(push, sshd):
    """The sshd of the connection dies with the network or the machine of the operator: the agent needs neither."""
    kill_sessions(sshd)
    assert push.client.wait(timeout=HANG) != 0
    push.go()
    with open_transport(push.host) as transport:
        assert deploy.status(transport).state == "applied"


def test_after_a_killed_agent_nobody_waits(tiny, push):
    """The lock dies with the process (bike_index#4313): a push that does not wait recovers, says so, and proceeds."""
    os.kill(push.agent, signal.SIGKILL)
    assert push.client.wait(timeout=HANG) != 0
    bundle, files = bundle_for(tiny.root, {"srt/new/d.py": b"D = 1\n"})
    with no_hang(), open_transport(push.host) as transport:
        plan = deploy.plan_push(transport, bundle, files)
        assert plan.unfinished.startswith("a push of d-0001 was interrupted")
        done = deploy.push(transport, plan, files, operator="bob", lock_wait=0)
        assert (done.id, transport.warnings) == ("d-0002", ["the interrupted push of d-0001 was put back first"])
        assert not (tiny.root / "srt/new/c.py").exists()
        assert (tiny.root / "srt/a.py").read_bytes() == b"VALUE = 1\n"


#: The operator's side of a push that has to wait; says for whom.
WAITING = CLIENT.replace('"ann@desk")', '"bob@desk", lock_wait=60, progress=lambda text: print(text, flush=True))')


def test_a_push_that_nobody_waits_for_any_more_does_not_begin(tiny, sshd, tmp_path):
    """Its operator has gone away while it waited for the lock: minutes later nobody expects a change (vespa#6474)."""
    host = sshd.host(python=str(tiny.python))
    (tmp_path / "push").write_bytes(pickle.dumps((host, *bundle_for(tiny.root, RESULTS))))
    before = listing(tiny.root)
    with lock.held(tiny.state, "ann@desk", "push", 0):
        client = subprocess.Popen([sys.executable, "-c", WAITING, tmp_path / "push"], stdout=subprocess.PIPE)
        try:
            assert client.stdout is not None
            told = client.stdout.readline().decode()
            assert told.startswith(f"waiting: ann@desk (pid {os.getpid()}) has been running a push here since"), told
        finally:
            client.kill()
            client.wait()
        until(lambda: not sessions_of(sshd))
    until(lambda: not agents_of(tiny))
    assert differences(before, listing(tiny.root)) == []
    with open_transport(host) as transport:
        assert deploy.history(transport) == []


def agents_of(tiny):
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += [file] if file.read_bytes().split(b"\0")[0] == os.fsencode(tiny.python) else []
    return found


def test_a_file_that_goes_away_while_a_plan_is_made_is_looked_at_again(tmp_path, monkeypatch):
    """Somebody else's swap between two looks at a file is no fault of the host: the plan is made anew."""
    tiny_package(tmp_path, "0.5.11")
    bundle, files = bundle_for(tmp_path / "sglang", {"srt/a.py": b"VALUE = 5\n"})
    near, real, gone = Direct(str(tmp_path / "sglang")), preflight.disk, [True, True]

    def disturbed(folder):
        if gone:
            gone.pop()
            raise FileNotFoundError(2, "No such file or directory", str(folder))
        return real(folder)

    monkeypatch.setattr(preflight, "disk", disturbed)
    assert deploy.plan_push(near, bundle, files).counts()["change"] == 1
    assert gone == []
