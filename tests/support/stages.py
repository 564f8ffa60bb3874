# SPDX-License-Identifier: Apache-2.0
"""Operations of the agent set up to be broken off at any step, and what is wrong after a recovery."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.support.crashes import Direct, Step, Work
from tests.support.installs import bundle_for
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
