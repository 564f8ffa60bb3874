# SPDX-License-Identifier: Apache-2.0
"""`kill -9` of the agent at every single step: after the next contact everything is as before or as after, never mixed.

Each crash point is a fresh copy of a small package, a process that is killed, and a recovery. The number of points is
printed at the end of each test (`pytest -s` or `-rP` shows it).
"""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.crashes import Direct, Step, Work, disturbed, killed, steps_of
from tests.support.installs import bundle_for, tiny_package
from tests.support.trees import Listing, differences, listing

from ddtree_overlay import deploy
from ddtree_overlay.remote import agent, transaction
from ddtree_overlay.remote.store import Store


#: The first overlay edits a module and adds one in a new folder; the second edits another, adds and takes away.
FIRST = {"srt/a.py": b"VALUE = 5\n", "srt/speculative/ddtree/c.py": b"C = 1\n"}
SECOND = {"srt/a.py": b"VALUE = 7\n", "srt/b.py": b"VALUE = 6\n", "srt/other/d.py": b"D = 1\n"}
PACKAGE = {"__init__.py": b"", "srt/__init__.py": b"", "srt/a.py": b"VALUE = 1\n", "srt/b.py": b"VALUE = 2\n"}


def push(site: Path, results: dict[str, bytes]) -> None:
    """Push `results`, made from the pristine package."""
    pristine = site.parent / "pristine/sglang"
    bundle, files = bundle_for(pristine, results)
    transport = Direct(str(site / "sglang"))
    deploy.push(transport, deploy.plan_push(transport, bundle, files), files, operator="tester")


def compile_all(site: Path) -> None:
    """Compiled files of every module, as an import leaves them. Their contents are beside the point."""
    for path in [*(site / "sglang").rglob("*.py")]:
        cache = path.parent / "__pycache__"
        cache.mkdir(exist_ok=True)
        (cache / f"{path.stem}.cpython-399.pyc").write_bytes(b"compiled " + path.read_bytes())


@dataclasses.dataclass(frozen=True)
class Scenario:
    """What lies there before, and the operation that is killed in it."""

    prepare: Callable[[Path], object]
    operate: Callable[[Path], object]


def rollback(site: Path, **options: object) -> None:
    deploy.rollback(Direct(str(site / "sglang")), operator="tester", **options)


def pushed(site: Path) -> None:
    push(site, FIRST)
    compile_all(site)


def pushed_twice(site: Path) -> None:
    pushed(site)
    push(site, SECOND)
    compile_all(site)


def pushed_before_anything_ran(site: Path) -> None:
    """The compiled files of the base come back with a rollback; the overlay has none yet."""
    compile_all(site)
    push(site, FIRST)
    push(site, SECOND)


SCENARIOS = {
    "push": Scenario(compile_all, lambda s: push(s, FIRST)),
    "push over a push": Scenario(pushed, lambda s: push(s, SECOND)),
    "rollback by one": Scenario(pushed_twice, rollback),
    "rollback to base": Scenario(pushed_before_anything_ran, lambda s: rollback(s, to="base")),
    "purge": Scenario(pushed, lambda s: rollback(s, purge=True)),
    "purge of a history": Scenario(lambda s: (pushed(s), rollback(s)), lambda s: rollback(s, purge=True)),
}


@dataclasses.dataclass
class Stage:
    """A scenario set up: the state before, the one after, and the single call that leads from one to the other."""

    folder: Path
    before: Listing
    after: Listing
    pristine: Listing
    call: tuple[str, dict[str, object], bytes]
    trace: list[Step]
    times: dict[str, int]

    @property
    def site(self) -> Path:
        return self.folder / "site"

    @property
    def store(self) -> Store:
        return Store(self.site / ".ddtree-overlay", self.site / "sglang")

    @property
    def steps(self) -> int:
        return len(self.trace)

    def middle(self) -> list[int]:
        """Steps from which a recovery has work to do: early, in the middle, and after the commit."""
        names = [path.rpartition("/")[2] for _, path, _ in self.trace]
        if "journal.json" not in names:
            return [names.index("purging") + 2]
        first, commit = names.index("journal.json") + 2, names.index("history.jsonl") + 1
        last = len(names) - names[::-1].index("journal.json")
        return sorted({first + (commit - first) // 2, commit, last})

    def reset(self, origin: str = "before") -> None:
        """Put the state before the operation back, or another one that was kept."""
        shutil.rmtree(self.site, ignore_errors=True)
        copy(self.folder / origin, self.site)

    def keep(self, name: str) -> None:
        copy(self.site, self.folder / name)

    def work(self) -> Work:
        op, args, payload = self.call
        return lambda: agent.answer({"op": op, "args": args}, payload)[0]

    def contact(self) -> str:
        """The next contact: what push and rollback do before anything else, and nothing more."""
        with transaction.session(self.store, "next", "recovery", 0, version="0.5.11") as note:
            return note


def copy(source: Path, target: Path) -> None:
    """A copy with modes, times and extended attributes."""
    shutil.copytree(source, target, symlinks=True)


def times(site: Path) -> dict[str, int]:
    """When each module of the package was changed."""
    return {str(p.relative_to(site)): p.stat().st_mtime_ns for p in (site / "sglang").rglob("*.py")}


@pytest.fixture(params=SCENARIOS)
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    """A scenario, on a file system in memory where there is one: thousands of fsyncs cost nothing there."""
    scenario = SCENARIOS[request.param]
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        site = Path(folder, "site")
        tiny_package(site, "0.5.11", PACKAGE)
        (site / "sglang/srt/a.py").chmod(0o640)
        copy(site, Path(folder, "pristine"))
        scenario.prepare(site)
        copy(site, Path(folder, "before"))
        before = listing(site)
        recorder = Recorder(site)
        with recorder:
            scenario.operate(site)
        after = listing(site)
        pristine = listing(Path(folder, "pristine"))
        made = Stage(Path(folder), before, after, pristine, recorder.call, [], times(Path(folder, "before")))
        made.reset()
        yield dataclasses.replace(made, trace=steps_of(made.work()))


class Recorder:
    """Keeps the call of the operation that changes files, so that it can be repeated without its plan."""

    def __init__(self, site: Path) -> None:
        del site
        self.call: tuple[str, dict[str, object], bytes] = ("", {}, b"")

    def __enter__(self) -> None:
        self._real = Direct.call

        def call(transport, op, args, payload=b"", **more):
            try:
                return self._real(transport, op, args, payload, **more)
            finally:
                self.call = transport.last if transport.last[0] else self.call

        Direct.call = call  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        Direct.call = self._real  # type: ignore[method-assign]


def package(found: Listing) -> Listing:
    return {k: v for k, v in found.items() if not k.startswith(".ddtree-overlay")}


def fault(stage: Stage) -> str:
    """What is wrong after a recovery, or ""."""
    found = listing(stage.site)
    wrong = [differences(package(known), package(found)) for known in (stage.before, stage.after)]
    if all(wrong):
        return f"neither before {wrong[0]} nor after {wrong[1]}"
    if not wrong[0] and wrong[1] and times(stage.site) != stage.times:
        return "the times of the files are not as before"
    store = stage.store
    known = {e["id"] for e in store.events()}
    residue = [n for n in found if n.startswith(".ddtree-overlay/") and leftover(n, known)]
    if residue:
        return f"left behind: {residue}"
    current = store.current()
    files = current["files"] if current else {}
    stray = [p for p, f in files.items() if (stage.site / "sglang" / p).read_bytes() != after_of(stage, current, p)]
    if stray:
        return f"the history says {current['id'] if current else None}, and these are not its files: {stray}"
    if current is None and differences(package(stage.pristine), sources(found)):
        return f"the history says nothing is deployed: {differences(package(stage.pristine), sources(found))}"
    return ""


def sources(found: Listing) -> Listing:
    return {k: v for k, v in package(found).items() if "__pycache__" not in k}


def after_of(stage: Stage, record: dict[str, object], path: str) -> bytes:
    return (stage.site / f".ddtree-overlay/deployments/{record['id']}/after/{path}").read_bytes()


def leftover(name: str, known: set[str]) -> bool:
    parts = Path(name).parts
    if len(parts) == 2:
        return parts[1] not in ("lock", "history.jsonl", "deployments")
    return parts[1] == "deployments" and (parts[2] not in known or parts[-1].endswith("tmp"))


def count(capsys: pytest.CaptureFixture[str], points: int) -> None:
    with capsys.disabled():
        sys.stdout.write(f" [{points} crash points] ")


def test_every_step_of_an_operation(stage, capsys):
    """Killed before each step in turn, then recovered: before or after, byte for byte, with modes and times."""
    faults, seen = {}, set()
    for at in range(1, stage.steps + 1):
        stage.reset()
        assert killed(stage.work(), at)
        note = stage.contact()
        problem = fault(stage)
        if "was put back first" in note and stage.store.events()[-1]["event"] != "recovered":
            problem = problem or "the history does not tell of the recovery"
        if problem:
            faults[at] = problem
        seen.add(differences(package(stage.before), package(listing(stage.site))) == [])
    count(capsys, stage.steps)
    assert faults == {}
    # Both ends were seen, or the operation changes nothing in the package.
    assert seen == ({True} if package(stage.before) == package(stage.after) else {True, False})


def test_every_step_of_a_recovery(stage, capsys):
    """The recovery is killed before each of its own steps; the one after it finds the same tree (known states only)."""
    faults, points = {}, 0
    for first in stage.middle():
        stage.reset()
        assert killed(stage.work(), first)
        name = f"crashed-{first}"
        stage.keep(name)
        for second in range(1, len(steps_of(stage.contact)) + 1):
            stage.reset(name)
            assert killed(stage.contact, second)
            stage.contact()
            points += 1
            problem = fault(stage)
            if problem:
                faults[first, second] = problem
    count(capsys, points)
    assert faults == {}


@pytest.mark.parametrize("stage", ["push"], indirect=True)
def test_a_push_that_is_killed_before_it_did_anything_is_seen_and_tidied_up(stage):
    """Even a bare lock is told of by status, and a plain rollback takes it away."""
    for at in range(2, stage.steps, 9):
        stage.reset()
        assert killed(stage.work(), at)
        near = Direct(str(stage.site / "sglang"))
        there = (stage.site / ".ddtree-overlay").exists()
        assert ("cut off" in deploy.status(near).unfinished or "interrupted" in deploy.status(near).unfinished) == there
        if not (stage.site / ".ddtree-overlay/history.jsonl").exists():
            rollback(stage.site)
            if at < 40:
                assert not (stage.site / ".ddtree-overlay").exists()


@pytest.mark.parametrize("stage", ["push", "push over a push"], indirect=True)
def test_what_was_imported_from_a_new_folder_meanwhile_goes_with_it(stage):
    """A server imports a new module between the crash and the recovery, and leaves a folder of compiled files."""
    added = [
        n for n, (kind, path, _) in enumerate(stage.trace, 2) if kind == "rename" and path.endswith(("c.py", "d.py"))
    ]
    stage.reset()
    assert killed(stage.work(), added[-1])
    for module in (stage.site / "sglang").rglob("[cd].py"):
        cache = module.parent / "__pycache__"
        cache.mkdir(exist_ok=True)
        (cache / f"{module.stem}.cpython-398.pyc").write_bytes(b"compiled")
    assert "was put back first" in stage.contact()
    found = {k: v for k, v in package(listing(stage.site)).items() if "cpython-398" not in k}
    assert differences(package(stage.before), found) == []


def test_the_next_operation_after_a_crash_is_none_the_worse(stage, capsys):
    """Whatever was killed and wherever: the next purge plans and ends with the pristine package, not one byte more."""
    points = range(1, stage.steps + 1, 5)
    for at in points:
        stage.reset()
        assert killed(stage.work(), at)
        rollback(stage.site, purge=True)
        assert differences(package(stage.pristine), sources(listing(stage.site))) == [], at
        assert not (stage.site / ".ddtree-overlay").exists(), at
    count(capsys, len(points))


def test_everything_is_on_disk_before_what_relies_on_it(stage):
    """A power cut loses what was not fsynced: copies come before the first file, files before the history."""
    state, root = f"{stage.site}/.ddtree-overlay", f"{stage.site}/sglang"
    dirty: set[str] = set()
    for kind, path, other in stage.trace:
        if not path.startswith(str(stage.site)) or path == f"{state}/lock":
            continue
        if kind == "fsync":
            dirty.discard(path)
            continue
        if path.startswith(root):
            assert {d for d in dirty if d.startswith(state)} == set(), (kind, path)
        if path == f"{state}/history.jsonl":
            assert {d for d in dirty if d.startswith(root)} == set(), kind
        if (kind, path) == ("remove", f"{state}/journal.json"):
            assert dirty == set()
        assert other not in dirty, f"{other} is renamed before its bytes are on disk"
        dirty -= {d for d in dirty if kind in ("remove", "rmdir") and d.startswith(path)}
        if kind not in ("rename", "remove", "rmdir"):
            dirty.add(path)
        if kind in ("rename", "remove", "rmdir", "mkdir", "create"):
            dirty.add(str(Path(path).parent))
    assert len(stage.trace) > 10


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name)
def test_signals_at_every_step_change_nothing(stage, number):
    """An operator's Ctrl-C, or the end of the session, twice before each step: it goes through (capistrano#351)."""
    op, args, payload = stage.call

    def work() -> None:
        call = {"op": op, "args": args, "timeout": 30.0}
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        agent.serve(call, payload, "mark")

    def interrupt(count: int, _: object) -> None:
        # The agent begins with setting itself up; nothing is open then.
        if count > 3:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)

    stage.reset()
    disturbed(work, interrupt)
    assert differences(package(stage.after), package(listing(stage.site))) == []
    assert stage.contact() == ""


FREEING = ("flock", "remove", "rmdir", "fsync")


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
def test_an_error_at_every_second_step(stage, lasting):
    """One step after the other fails: the answer is true, and once the cause is gone the tree is before or after."""
    faults, kinds = {}, set()
    for at in range(1, stage.steps + 1, 2):

        def fail(number: int, step: Step, at: int = at) -> None:
            # A full disk forbids nothing that gives space back; a failing one may refuse anything, once.
            if number >= at if lasting and step[0] not in FREEING else number == at:
                code = errno.ENOSPC if lasting else errno.EIO
                raise OSError(code, os.strerror(code))

        stage.reset()
        answer = disturbed(stage.work(), fail)
        kind = "" if answer["ok"] else answer["error"]["kind"]
        kinds.add(kind)
        site = package(listing(stage.site))
        unchanged = differences(package(stage.before), site) == []
        # Folders that could not be removed at the end are removed by the next contact, as the journal says.
        done = differences(package(stage.after), site) == [] or (stage.site / ".ddtree-overlay/journal.json").exists()
        problem = "" if {"": done}.get(kind, unchanged) else f"{kind}: {answer}"
        if kind == "failed" and "no overlay is left" in answer["error"]["what"]:
            problem = "" if done else f"not done: {answer}"
        if kind == "incomplete":
            problem = "" if lasting and not unchanged else f"not incomplete: {answer}"
        stage.contact()
        problem = problem or fault(stage)
        if problem:
            faults[at] = problem
    assert faults == {}
    assert kinds <= {"", "failed", "rolled-back", "incomplete"}
