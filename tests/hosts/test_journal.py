# SPDX-License-Identifier: Apache-2.0
"""Laws of the transaction: any order of operations and crashes, and any damage to the journal."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.crashes import Direct, killed, steps_of
from tests.support.installs import bundle_for, tiny_package
from tests.support.trees import Listing, differences, listing

from ddtree_overlay import deploy
from ddtree_overlay.errors import OverlayError
from ddtree_overlay.remote import transaction
from ddtree_overlay.remote.common import Refusal
from ddtree_overlay.remote.store import Store


OVERLAYS = {
    "one": {"srt/a.py": b"VALUE = 5\n", "srt/new/c.py": b"C = 1\n"},
    "two": {"srt/b.py": b"VALUE = 6\n", "srt/new/c.py": b"C = 2\n", "srt/new/deep/d.py": b"D = 1\n"},
    "three": {"srt/a.py": b"VALUE = 7\n", "srt/b.py": b"VALUE = 8\n"},
}
QUICK = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


class World:
    """A package, and what should be deployed on it: the overlays that lie on each other."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.site = folder, folder / "site"
        tiny_package(folder / "pristine", "0.5.11")
        self.pristine = listing(folder / "pristine")
        self.reset()

    def reset(self) -> None:
        shutil.rmtree(self.site, ignore_errors=True)
        shutil.copytree(self.folder / "pristine", self.site)
        self.chain: list[str] = []

    @property
    def near(self) -> Direct:
        return Direct(str(self.site / "sglang"))

    @property
    def store(self) -> Store:
        return Store(self.site / ".ddtree-overlay", self.site / "sglang")

    def push(self, name: str) -> None:
        bundle, files = bundle_for(self.folder / "pristine/sglang", OVERLAYS[name])
        deploy.push(self.near, deploy.plan_push(self.near, bundle, files), files, operator="x")

    def contact(self) -> None:
        with transaction.session(self.store, "x", "recovery", 0, version="0.5.11"):
            pass

    def do(self, action: str) -> list[str]:
        """Carry out `action`; gives the chain afterwards."""
        if action in OVERLAYS:
            self.push(action)
            return self.chain if self.chain[-1:] == [action] else [*self.chain, action]
        deploy.rollback(self.near, to="base" if action == "base" else None, purge=action == "purge")
        return self.chain[:-1] if action == "back" else []

    def sources(self) -> dict[str, bytes]:
        files = (p for p in (self.site / "sglang").rglob("*") if p.is_file() and p.suffix != ".pyc")
        return {p.relative_to(self.site / "sglang").as_posix(): p.read_bytes() for p in files}

    def expected(self, chain: list[str]) -> dict[str, bytes]:
        files = {
            p.removeprefix("sglang/") for p, what in self.pristine.items() if p.startswith("sglang/") and "file" in what
        }
        bare = {p: (self.folder / "pristine/sglang" / p).read_bytes() for p in files}
        return {**bare, **(OVERLAYS[chain[-1]] if chain else {})}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield World(Path(folder))


ACTIONS = st.tuples(st.sampled_from([*OVERLAYS, "back", "base", "purge"]), st.none() | st.integers(1, 160))


@QUICK
@given(st.lists(ACTIONS, max_size=7))
def test_any_order_of_operations_and_crashes_leaves_a_known_state(world, actions):
    """Pushes, rollbacks and purges, some killed at some step: always what was there before, or what was asked for."""
    world.reset()
    for action, crash in actions:
        if crash is None:
            world.chain = world.do(action)
        else:
            before = world.chain
            finished = not killed(lambda action=action: world.do(action) and None, crash)
            world.contact()
            after = planned(before, action)
            found = world.sources()
            assert found in (world.expected(before), world.expected(after))
            assert not finished or found == world.expected(after)
            world.chain = after if found == world.expected(after) else before
        assert world.sources() == world.expected(world.chain)
        status = deploy.status(world.near)
        assert (status.state, status.unfinished) == ("applied" if world.chain else "pristine", "")
        live = world.store.current()
        assert (live is None) == (not world.chain)
    deploy.rollback(world.near, to="base", purge=True)
    assert differences(world.pristine, listing(world.site)) == []


def planned(chain: list[str], action: str) -> list[str]:
    """The chain after `action` was done on `chain`."""
    if action in OVERLAYS:
        return chain if chain[-1:] == [action] else [*chain, action]
    return chain[:-1] if action == "back" else []


@pytest.fixture(scope="module")
def crashed(world) -> bytes:
    """A push over a push that was killed half-way, kept in the folder `crashed`; the bytes of its journal."""
    world.reset()
    world.push("one")
    shutil.copytree(world.site, world.folder / "one")
    trace = [path for _, path, _ in steps_of(lambda: world.push("two"))]
    middle = (trace.index(f"{world.site}/.ddtree-overlay/journal.json") + len(trace)) // 2
    shutil.rmtree(world.site)
    shutil.copytree(world.folder / "one", world.site)
    assert killed(lambda: world.push("two"), middle)
    shutil.copytree(world.site, world.folder / "crashed")
    return (world.site / ".ddtree-overlay/journal.json").read_bytes()


@QUICK
@given(st.data())
def test_a_damaged_journal_is_recovered_from_or_refused_by_name(world, crashed, data):
    """Cut anywhere, or any byte of it altered: the old state comes back, or nothing at all is touched."""
    at = data.draw(st.integers(0, len(crashed) - 1))
    altered = crashed[:at] + bytes([data.draw(st.integers(0, 255))]) + crashed[at + 1 :]
    for journal in (crashed[:at], altered):
        shutil.rmtree(world.site)
        shutil.copytree(world.folder / "crashed", world.site)
        (world.site / ".ddtree-overlay/journal.json").write_bytes(journal)
        before = package_and_state(world.site)
        refused = []
        try:
            world.contact()
        except Refusal as refusal:
            refused = [f"{refusal.what} {refusal.next_step}"]
        if not refused:
            assert world.sources() == world.expected(["one"])
            continue
        assert f"mv {world.site}/.ddtree-overlay/journal.json" in refused[0]
        assert differences(before, package_and_state(world.site)) == []
        with pytest.raises(OverlayError, match=r"journal\.json"):
            deploy.status(world.near)


def package_and_state(site: Path) -> Listing:
    """Everything but the text of the lock."""
    return {k: v for k, v in listing(site).items() if k != ".ddtree-overlay/lock"}


@QUICK
@given(st.integers(0, 10_000))
def test_a_torn_history_is_as_it_was_before_its_last_line(world, cut):
    """Cut anywhere in its last line, as by a power cut: the events before it count, and the next one is whole."""
    world.reset()
    world.push("one")
    history = world.site / ".ddtree-overlay/history.jsonl"
    first = history.read_bytes()
    world.push("two")
    whole = history.read_bytes()
    history.write_bytes(whole[: len(first) + cut % (len(whole) - len(first))])
    assert [e["id"] for e in world.store.events()] == ["d-0001"]
    # The second overlay is in place all the same, and the way back from it is known.
    assert deploy.status(world.near).state == "unrecorded"
    assert deploy.rollback(world.near).undone == ("d-0002",)
    assert world.sources() == world.expected(["one"])
    assert [e["event"] for e in world.store.events()] == ["push", "push", "rollback"]
