# SPDX-License-Identifier: Apache-2.0
"""Which running processes have other code than is in place now."""

from __future__ import annotations

from typing import Any

import pytest

from ddtree_overlay.remote.ages import now, outdated, start_of


AT = {"boot": "this", "up": 1000.0}
WALL = 5000.0


def event(kind: str, current: str | None, time: float, overlay: str = "x", **more: Any) -> dict[str, Any]:
    return {"event": kind, "id": current or "d-0001", "current": current, "overlay_id": overlay, "time": time, **more}


FIRST, SECOND = event("push", "d-0001", 100), event("push", "d-0002", 200, "y")
BACK, BASE = event("rollback", "d-0001", 300), event("rollback", None, 400)


@pytest.mark.parametrize(
    ("events", "fresh"),
    [
        ([], {50, 150, 250, 350, 450}),
        ([FIRST], {150, 250, 350, 450}),
        ([FIRST, SECOND], {250, 350, 450}),
        ([FIRST, SECOND, BACK], {150, 350, 450}),
        ([FIRST, SECOND, BACK, BASE], {50, 450}),
        ([FIRST, event("good", "d-0001", 120), event("pruned", "d-0001", 130)], {150, 250, 350, 450}),
        ([FIRST, BASE, event("push", "d-0002", 410)], {150, 250, 350, 450}),
    ],
    ids=["nothing", "push", "second", "back", "base", "marks", "again"],
)
def test_a_process_is_outdated_when_something_else_was_in_place_at_its_start(events, fresh):
    """After a rollback the server from before the push is right again, and one from in between is not."""
    assert {s for s in (50, 150, 250, 350, 450) if not outdated(events, s, {}, WALL)} == fresh


def test_a_process_that_started_among_half_swapped_files_is_outdated():
    """Between a crash and the next contact the files are of two states."""
    begun = {"time": 200.0}
    events = [FIRST, event("recovered", "d-0001", 300, "y", begun=begun)]
    assert [outdated(events, s, {}, WALL) for s in (150, 250, 350)] == [False, True, False]


def test_a_clock_that_was_set_does_not_hide_an_old_process():
    """Pushed while the clock was an hour behind: by the wall clock every process is younger (dnf-plugins-core#595)."""
    pushed = event("push", "d-0001", WALL - 3600 - 100, boot="this", up=900.0)
    assert outdated([pushed], WALL - 500, AT, WALL)
    assert not outdated([pushed], WALL - 50, AT, WALL)
    assert not outdated([pushed], WALL - 500, {"boot": "another", "up": 1000.0}, WALL)


def test_a_process_that_started_right_after_a_push_is_not_taken_for_older():
    """The start of the machine is told in whole seconds, up to one too few; the start of a process to 10 ms."""
    pushed = event("push", "d-0001", WALL - 10, boot="this", up=990.0)
    after, before = ({"up": up, "started": WALL - 1000.9 + up} for up in (990.05, 989.95))
    assert not outdated([pushed], start_of(after, AT, WALL), AT, WALL)
    assert outdated([pushed], start_of(before, AT, WALL), AT, WALL)
    assert start_of(after, {}, WALL) == after["started"]


def test_this_moment_is_told_by_a_clock_that_nobody_sets():
    first, second = now(), now()
    assert first["boot"] == second["boot"]
    assert 0 <= second["up"] - first["up"] < 60
