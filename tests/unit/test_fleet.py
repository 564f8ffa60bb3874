# SPDX-License-Identifier: Apache-2.0
"""The order of a fleet's steps and its exit code, for every way in which hosts can fail; hosts are simulated here."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.waiting import until

from ddtree_overlay import fleet
from ddtree_overlay.crew import Crew, FaultError
from ddtree_overlay.errors import (
    ConflictError,
    ConnectionFailedError,
    LockedError,
    OverlayError,
    RollbackIncompleteError,
    RolledBackError,
)
from ddtree_overlay.fleet import Outcome, exit_code, roll_out


#: What a step of a simulated host does: None lets it work.
STAGE = (None, None, None, ConflictError, LockedError, ConnectionFailedError)
SWAP = (None, None, None, RolledBackError, RollbackIncompleteError, LockedError, "lost before", "lost after", "fault")
PROVE = (None, None, OverlayError, ConnectionFailedError)
UNDO = (None, None, None, ConnectionFailedError, RollbackIncompleteError)


class Simulated:
    """A host with a tree that is old or new, and steps that do what they are told."""

    def __init__(self, name, world, *, stage=None, swap=None, prove=None, undo=None):
        self.name = name
        self.tree = "old"
        self.staged = False
        self._world = world
        self._stage, self._swap, self._prove, self._undo = stage, swap, prove, undo

    def stage(self, _):
        with self._world.step("stage", self):
            self.staged = True
            if self._stage:
                self.staged = False
                raise self._stage("no")

    def unstage(self, _):
        with self._world.step("unstage", self):
            self.staged = False

    def swap(self, _):
        with self._world.step("swap", self):
            if self._swap == "fault":
                raise ZeroDivisionError
            if self._swap in {None, "lost after"}:
                self.tree, self.staged = "new", False
            if self._swap in {RolledBackError, RollbackIncompleteError}:
                self.tree, self.staged = "half" if self._swap is RollbackIncompleteError else "old", False
            if self._swap:
                raise (ConnectionFailedError if isinstance(self._swap, str) else self._swap)("no")

    def prove(self, _):
        with self._world.step("prove", self):
            if self._prove:
                raise self._prove("no")

    def undo(self, _):
        with self._world.step("undo", self):
            if self._undo:
                raise self._undo("no")
            self.tree, self.staged = "old", False


class World:
    """What happened, in which order, and how much of it at the same time."""

    def __init__(self):
        self.log = []
        self.most = 0
        self._now = 0
        self._lock = threading.Lock()
        self.entered = threading.Event()

    def step(self, kind, member):
        world = self

        class Step:
            def __enter__(self):
                with world._lock:
                    world.log.append((kind, member.name))
                    world._now += 1
                    world.most = max(world.most, world._now)
                world.entered.set()

            def __exit__(self, *_):
                with world._lock:
                    world._now -= 1
                    world.log.append((kind + " done", member.name))

        return Step()

    def first(self, kind):
        return next((i for i, (k, _) in enumerate(self.log) if k == kind), len(self.log))

    def last(self, kind):
        return max((i for i, (k, _) in enumerate(self.log) if k == kind), default=-1)


members = st.lists(
    st.tuples(*(st.sampled_from(range(len(s))) for s in (STAGE, SWAP, PROVE, UNDO))), min_size=1, max_size=6
)


@settings(max_examples=300, deadline=None)
@given(members, st.integers(1, 4), st.integers(0, 3), st.booleans())
def test_a_fleet_is_never_left_mixed_without_saying_so(scripts, parallel, canaries, proving):
    """Whatever fails where: all hosts are new, or every one that is not old again is reported (gpustack#2691)."""
    world = World()
    hosts = [
        Simulated(f"h{i}", world, stage=STAGE[a], swap=SWAP[b], prove=PROVE[c], undo=UNDO[d])
        for i, (a, b, c, d) in enumerate(scripts)
    ]
    outcomes = roll_out(hosts, Crew(parallel, lambda *_: None), canaries=canaries, proving=proving)
    fates = {o.host: o.fate for o in outcomes}
    code = exit_code(outcomes)

    assert [o.host for o in outcomes] == [h.name for h in hosts]
    assert world.most <= parallel
    assert world.last("stage done") < world.first("swap"), "a host was swapped before all were staged"
    if code == 0:
        assert {h.tree for h in hosts} == {"new"} and set(fates.values()) == {"changed"}
    else:
        assert "changed" not in fates.values()
        for host in hosts:
            assert host.tree == "old" or fates[host.name] in {"incomplete", "unknown"}
            assert not host.staged or fates[host.name] in {"incomplete", "unknown"}
    assert (code == 7) == bool({"incomplete", "unknown"} & set(fates.values()))
    assert code != 6 or "undone" in fates.values()
    if any(STAGE[a] for a, _, _, _ in scripts):
        assert world.first("swap") == len(world.log), "a host was swapped although another refused"
    if code in {1, 4, 5, 8}:
        assert set(fates.values()) <= {"refused", "untouched"}
    if proving and canaries:
        rest = {h.name for h in hosts[canaries:]}
        begun = [i for i, (kind, name) in enumerate(world.log) if kind == "swap" and name in rest]
        proven = [i for i, (kind, name) in enumerate(world.log) if kind == "prove done" and name not in rest]
        assert not begun or (len(proven) == len(hosts[:canaries]) and max(proven) < min(begun))


@settings(max_examples=100, deadline=None)
@given(members, st.integers(1, 4))
def test_the_same_failures_give_the_same_answer_one_at_a_time(scripts, parallel):
    """How many are worked on at once decides how fast it goes, not whether the fleet ends up changed."""

    def changed(at_once):
        hosts = [Simulated(f"h{i}", World(), stage=STAGE[a], swap=SWAP[b]) for i, (a, b, _, _) in enumerate(scripts)]
        return exit_code(roll_out(hosts, Crew(at_once, lambda *_: None))) == 0

    assert changed(parallel) == changed(1)


def test_one_host_that_refuses_keeps_every_other_from_being_swapped():
    """Staged are all, swapped is none, and no stage is left (two-phase: gpustack#2691)."""
    world = World()
    hosts = [Simulated("a", world), Simulated("b", world, stage=ConflictError), Simulated("c", world)]
    outcomes = roll_out(hosts, Crew(2, lambda *_: None))
    assert [o.fate for o in outcomes] == ["untouched", "refused", "untouched"]
    assert exit_code(outcomes) == 4
    assert {kind for kind, _ in world.log} == {"stage", "stage done", "unstage", "unstage done"}
    assert not any(h.staged for h in hosts)


@pytest.mark.parametrize("trouble", [None, OverlayError])
def test_the_others_wait_for_the_canary(trouble):
    """Only a canary that has proven itself lets the others begin; one that has not is put back alone."""
    world = World()
    hosts = [Simulated("a", world, prove=trouble), Simulated("b", world), Simulated("c", world)]
    outcomes = roll_out(hosts, Crew(3, lambda *_: None), canaries=1, proving=True)
    swapped = [i for i, step in enumerate(world.log) if step in {("swap", "b"), ("swap", "c")}]
    if trouble:
        assert [o.fate for o in outcomes] == ["undone", "untouched", "untouched"]
        assert (exit_code(outcomes), swapped) == (6, [])
    else:
        assert [o.fate for o in outcomes] == ["changed"] * 3
        assert world.log.index(("prove done", "a")) < min(swapped)


def test_a_failed_swap_stops_those_that_were_not_begun_with():
    """One at a time, and the second fails: the third is never touched, the first is put back."""
    world = World()
    hosts = [Simulated("a", world), Simulated("b", world, swap=LockedError), Simulated("c", world)]
    outcomes = roll_out(hosts, Crew(1, lambda *_: None))
    assert [o.fate for o in outcomes] == ["undone", "refused", "untouched"]
    assert exit_code(outcomes) == 6
    assert ("swap", "c") not in world.log
    assert ("undo", "b") not in world.log


@pytest.mark.parametrize(
    ("found", "code"),
    [
        ([], 0),
        (["current", "changed"], 0),
        ([("refused", ConflictError), ("refused", ConnectionFailedError), "untouched"], 8),
        ([("refused", LockedError), ("refused", OverlayError)], 1),
        ([("refused", LockedError), ("refused", ConflictError)], 4),
        ([("refused", LockedError), "untouched"], 5),
        ([("refused", LockedError), "undone"], 6),
        ([("undone", RolledBackError), "undone"], 6),
        ([("unknown", ConnectionFailedError), "undone"], 7),
        ([("incomplete", RollbackIncompleteError), ("refused", ConflictError)], 7),
    ],
)
def test_the_exit_code_says_the_worst(found, code):
    """Half-changed hosts first, then undone ones, then why nothing was changed (patch-package#143: never 0)."""
    outcomes = [
        Outcome(str(i), f, None) if isinstance(f, str) else Outcome(str(i), f[0], f[1]("no"))
        for i, f in enumerate(found)
    ]
    assert exit_code(outcomes) == code


def test_an_interrupted_fleet_is_130_unless_something_is_left():
    """Ctrl-C ends with 130 when every host is known to be as before, and with 7 when one is not."""
    undone = Outcome("a", "undone")
    assert exit_code([undone], interrupted=True) == 130
    assert exit_code([undone, Outcome("b", "unknown", ConnectionFailedError("gone"))], interrupted=True) == 7


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_ctrl_c_finishes_what_has_begun_and_puts_it_back(number):
    """A real signal while the first of three is swapped: it ends, nobody else begins, it is undone (capistrano#351)."""
    world = World()
    hosts = [Simulated(n, world) for n in "abc"]
    slow = hosts[0].swap

    def swap(say):
        os.kill(os.getpid(), number)
        until(lambda: crew.interrupted)
        slow(say)

    hosts[0].swap = swap
    told = []
    crew = Crew(1, lambda _, text: told.append(text))
    with crew.minding_interrupts():
        outcomes = roll_out(hosts, crew)
    assert [o.fate for o in outcomes] == ["undone", "untouched", "untouched"]
    assert [h.tree for h in hosts] == ["old"] * 3
    assert exit_code(outcomes, interrupted=crew.interrupted) == 130
    assert any("interrupted" in text for text in told)


def test_the_second_ctrl_c_waits_for_nothing_and_says_what_is_not_known():
    """A host that has stalled cannot hold the command; its fate is unknown, and that is exit 7."""
    world, release = World(), threading.Event()
    hosts = [Simulated(n, world) for n in "ab"]

    def stalled(_):
        crew.interrupt()
        crew.interrupt()
        release.wait(100)

    hosts[1].swap = stalled
    crew = Crew(1, lambda *_: None)
    try:
        outcomes = roll_out(hosts, crew)
    finally:
        release.set()
    assert [o.fate for o in outcomes] == ["incomplete", "unknown"]
    assert exit_code(outcomes, interrupted=True) == 7


def test_lines_are_told_by_the_thread_that_waits():
    """Every line comes from one thread, so none is torn by another (one line per host and phase)."""
    told = []
    crew = Crew(4, lambda name, text: told.append((threading.current_thread(), name, text)))

    class Host:
        def __init__(self, name):
            self.name = name

    hosts = [Host(f"h{i}") for i in range(20)]
    results = crew.each(hosts, lambda host, say: say(f"about {host.name}"))
    assert {thread for thread, _, _ in told} == {threading.current_thread()}
    assert {(name, text) for _, name, text in told} == {(h.name, f"about {h.name}") for h in hosts}
    assert len(results) == 20


@pytest.mark.parametrize(
    "fault", [OSError(5, "Input/output error"), OverlayError("cannot write"), ValueError("closed")]
)
def test_a_terminal_that_is_gone_does_not_end_the_work_half_way(fault):
    """Lines that nobody can read are lost; the hosts are all changed all the same."""

    def tell(*_):
        raise fault

    hosts = [Simulated(n, World()) for n in "ab"]
    for host in hosts:
        host.stage = lambda say: say("staged")
    assert [o.fate for o in roll_out(hosts, Crew(2, tell))] == ["changed", "changed"]


def test_a_fault_of_our_own_is_an_answer_about_its_host():
    """A bug at one host does not take the others' answers with it."""

    class Host:
        name = "a"

    (found,) = Crew(2, lambda *_: None).each([Host()], lambda *_: {}[1]).values()
    assert isinstance(found, FaultError) and "KeyError" in found.what
    assert fleet.worst({found.exit_code}) == 1
