# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from tests.support.statuses import host_status

from ddtree_overlay.doctor import Difference
from ddtree_overlay.manifest import Bundle, Change
from ddtree_overlay.plans import (
    Deployment,
    FileAction,
    FileStatus,
    Process,
    PushPlan,
    RollbackPlan,
    RollbackResult,
)
from ddtree_overlay.render import STYLES
from ddtree_overlay.reports import (
    bundle_lines,
    comparison_lines,
    counted,
    deployed_line,
    finding_lines,
    history_lines,
    listed,
    plain,
    plan_lines,
    rollback_plan_lines,
    rolled_back_line,
    status_lines,
)
from ddtree_overlay.verify import Finding


def action(path: str, kind: str, **over) -> FileAction:
    values = {"added": 3, "removed": 0, "mode": 0o640, "owner": "root:gpu", "nlink": 1, "reason": ""} | over
    return FileAction(path, kind, "a" * 64, "b" * 64, "a" * 64, **values)


def plan(*actions: FileAction, **over) -> PushPlan:
    values = {
        "host": "ct200",
        "target": "--host ct200",
        "root": "/opt/sglang",
        "actions": actions,
        "blockers": (),
        "warnings": (),
        "processes": (),
        "unfinished": "",
        "install": "wheel",
        "version": "0.5.11",
        "python": "3.11.7",
        "executable": "/opt/python",
        "overlay_id": "91c0",
        "base_id": "3f2a",
        "release": "0.5.11",
        "deployment": None,
    }
    return PushPlan(**(values | over))


def deployment(number: int = 1, **over) -> Deployment:
    values = {
        "state": "good",
        "overlay_id": "91c0",
        "base_id": "3f2a",
        "release": "0.5.11",
        "version": "0.5.11",
        "operator": "ann@laptop",
        "time": 0.0,
        "files": 2,
        "current": False,
        "undone": None,
        "note": "",
    }
    return Deployment(id=f"d-{number:04d}", **(values | over))


def text(lines) -> list[str]:
    assert all(style in STYLES for line in lines for _, style in line)
    return [plain(line) for line in lines]


def test_plan_shows_each_file_and_the_counts():
    """Signs, line counts, mode and owner; files that stay the same are only counted."""
    processes = (Process(4711, "python -m sglang.launch_server", 0.0, stale=True),)
    shown = plan(
        action("srt/new.py", "add", added=12),
        action("srt/a.py", "change", removed=1),
        action("srt/same.py", "same"),
        warnings=("look here",),
        processes=processes,
    )

    assert text(plan_lines(shown)) == [
        "ct200  sglang 0.5.11  /opt/sglang (wheel)",
        "  ~ srt/a.py     +3 -1  0640 root:gpu",
        "  + srt/new.py  +12     new",
        "Plan: 1 to add, 1 to change, 0 to remove, 1 already there.  base 3f2a  overlay 91c0",
        "warning: look here",
        "restart: 1 running process (pid 4711) keeps the old code until restarted",
    ]


def test_conflict_in_a_plan_is_named_with_its_reason():
    """A file that stops the push is marked, counted and explained."""
    shown = text(plan_lines(plan(action("srt/a.py", "conflict", reason="edited since the snapshot"))))

    assert shown[1] == "  ! srt/a.py  +3  0640 root:gpu  edited since the snapshot"
    assert "1 in conflict" in shown[2]


def test_rollback_plan_counts_what_stops_it_and_what_comes_back():
    """A deleted file comes back as a restored one; a conflict is counted, since it stops everything."""
    actions = (
        action("srt/a.py", "add"),
        action("srt/b.py", "conflict", reason="changed"),
        action("srt/c.py", "remove"),
    )
    shown = RollbackPlan(
        host="ct200",
        target="--host ct200",
        root="/opt/sglang",
        actions=actions,
        blockers=(),
        warnings=(),
        processes=(),
        unfinished="",
        current="d-0001",
        to="base",
        undoes=("d-0001",),
        purge=False,
    )

    assert text(rollback_plan_lines(shown))[-1] == "Plan: 1 to restore, 1 to remove, 1 in conflict"


def test_bundle_lists_changed_files_before_new_ones():
    """`patch` shows what it changes first."""
    bundle = Bundle("0.5.11", (Change("srt/a_new.py", None, "x", 9, 0), Change("srt/b.py", "y", "z", 4, 0)))

    assert text(bundle_lines("ct200", bundle, "build/x"))[1:] == [
        "  ~ srt/b.py      +4",
        "  + srt/a_new.py  +9",
        "1 added, 1 file changed, in build/x",
    ]


def test_findings_are_listed_worst_first_and_counted():
    """The closing line counts by severity."""
    found = [
        Finding("sites", "info", "", None, "fine"),
        Finding("syntax", "error", "srt/a.py", 7, "bad"),
        Finding("host", "warning", "srt/b.py", None, "odd"),
    ]

    assert text(finding_lines(found)) == [
        "error   syntax: srt/a.py:7: bad",
        "warning host: srt/b.py: odd",
        "info    sites: fine",
        "verify: 1 error, 1 warning, 1 note",
    ]


def test_status_names_the_files_that_are_not_as_they_should_be():
    """A drifted host shows the state, the reason, the deployment and each foreign file."""
    files = (FileStatus("srt/a.py", "foreign", "edited by hand"), FileStatus("srt/b.py", "ours", ""))
    processes = (Process(1, "x", 0.0, stale=False),)
    found = host_status("drifted", deployment=deployment(current=True), files=files, processes=processes)

    assert text(status_lines(found)) == [
        "ct200  drifted  sglang 0.5.11  /opt/sglang",
        "  1 file was edited",
        "  d-0001 (good)  overlay 91c0  1970-01-01 00:00 UTC by ann@laptop",
        "  ! srt/a.py  foreign  edited by hand",
        "  next: ddtree-overlay diff --host ct200  # shows the change and how to take it back",
    ]


@pytest.mark.parametrize(
    ("state", "step"),
    [
        ("pristine", ""),
        ("applied", ""),
        ("partial", "ddtree-overlay push --host ct200  # puts them in place"),
        (
            "upgraded",
            "ddtree-overlay snapshot --host ct200 && ddtree-overlay patch --host ct200 && ddtree-overlay push",
        ),
        ("orphaned", "ddtree-overlay rollback --host ct200 --purge"),
        ("unrecorded", "ddtree-overlay rollback --host ct200"),
    ],
)
def test_status_leads_out_of_every_state_in_which_somebody_has_to_act(state, step):
    """A settled host has no next step, every other state has one; a package that is gone is not listed file by file."""
    files = (FileStatus("srt/a.py", "missing", "deleted since the push"),)
    shown = text(status_lines(host_status(state, deployment=deployment(current=True), files=files)))

    assert [line.startswith(f"  next: {step}") for line in shown if "next: " in line] == ([True] if step else [])
    assert any("srt/a.py" in line for line in shown) == (state in {"applied", "partial", "unrecorded"})
    assert ("sglang not installed" in shown[0]) == (state == "orphaned")


def test_history_marks_the_current_deployment_and_what_was_undone():
    """One line a deployment, in the order they happened."""
    found = [deployment(1, undone=9.0), deployment(2, current=True, note="second try")]

    assert text(history_lines("ct200", found)) == [
        "ct200  2 deployments",
        "  d-0001  rolled back  overlay 91c0  sglang 0.5.11  1970-01-01 00:00 UTC  ann@laptop",
        " *d-0002  good         overlay 91c0  sglang 0.5.11  1970-01-01 00:00 UTC  ann@laptop  second try",
    ]
    assert text(history_lines("ct200", [])) == ["ct200  no deployments"]


def test_comparison_puts_both_hosts_side_by_side():
    """Only differences are listed; equal hosts are said to be equal."""
    assert text(comparison_lines("a", "b", [Difference("torch", "2.9.1", "2.10.0")])) == [
        "         a      b",
        "  torch  2.9.1  2.10.0",
        "1 difference between a and b",
    ]
    assert text(comparison_lines("a", "b", [])) == ["a and b do not differ"]


def test_closing_lines_say_what_was_done():
    """Push and rollback end with one sentence that can be quoted."""
    done = RollbackResult("ct200", ("d-0001",), "base", 7, 10, 1, purged=True, verified=17)

    assert (
        plain(deployed_line(plan(), deployment())) == "ct200: pushed as d-0001 (good), overlay 91c0, 2 files verified"
    )
    assert plain(rolled_back_line(done)) == (
        "ct200: back to the base: 7 restored, 10 removed, 17 verified, backups and history removed"
    )


def test_numbers_and_lists_read_like_english():
    """No `1 files`, no endless list."""
    assert (counted(1, "file"), counted(0, "file"), counted(2, "process", "processes")) == (
        "1 file",
        "0 files",
        "2 processes",
    )
    assert listed("abcdefg", 3) == "a, b, c and 4 more"
