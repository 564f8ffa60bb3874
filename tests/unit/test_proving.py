# SPDX-License-Identifier: Apache-2.0
"""Verdicts about a server, from what it said and which processes there are; nothing is asked or restarted here."""

from __future__ import annotations

import pytest

from ddtree_overlay.remote.asking import Heard
from ddtree_overlay.remote.proving import Before, Want, judge, replaced
from ddtree_overlay.remote.restarting import Restarted, blotted, commands, manual


NEW, OLD = "33d0b6569ace", "91c000000000"
WANT = Want(NEW, ("DDTREE",))
DONE = Restarted(True, "", ())
FAILED = Restarted(False, "sh ended with exit status 5", ())
DOWN = Heard("down", "Connection refused")


def up(overlay_id: str | None, algorithm: str | None = "DDTREE", kind: str = "up") -> Heard:
    return Heard(kind, "said", algorithm, overlay_id)


@pytest.mark.parametrize(
    ("was", "heard", "done", "changed", "verdict", "touched"),
    [
        (up(OLD), up(NEW), DONE, True, "live", True),
        (up(OLD), up(NEW), DONE, None, "live", True),
        (DOWN, up(NEW), DONE, True, "live", True),
        (up(NEW), up(NEW), DONE, False, "live", True),
        # Nothing was restarted: the same answer from the same processes, or where none can be seen.
        (up(OLD), up(OLD), DONE, False, "unrestarted", False),
        (up(None, None), up(None, None), DONE, None, "unrestarted", False),
        (up(OLD), up(OLD), FAILED, False, "restart-failed", False),
        # Something was: another process gives the old answer, or the old process is gone.
        (up(OLD), up(OLD), DONE, True, "other", True),
        (up(OLD), up(None, None), DONE, True, "other", True),
        (up(OLD), DOWN, DONE, True, "unhealthy", True),
        (up(OLD), DOWN, FAILED, None, "restart-failed", True),
        (DOWN, DOWN, DONE, False, "unhealthy", True),
        # The new code is loaded: whatever else is wrong, going back needs a restart.
        (up(OLD), up(NEW, kind="starting"), DONE, True, "unhealthy", True),
        (up(NEW, "DFLASH"), up(NEW, "DFLASH"), DONE, False, "other", True),
    ],
)
def test_verdict(*, was: Heard, heard: Heard, done: Restarted, changed: bool | None, verdict: str, touched: bool):
    """`live` needs the overlay, the algorithm and a token; files go back alone only where no process has new code."""
    found = judge(heard, WANT, Before(was, {7: 1.0}), done, changed=changed)

    assert (found[0], found[2]) == (verdict, touched)
    assert found[1]


def test_verdict_about_the_base_takes_any_algorithm_unless_one_is_known():
    """Before the first push there is no overlay to report; an install that served DFLASH has to serve DFLASH again."""
    before = Before(DOWN, {})

    assert judge(up(None, "DFLASH"), Want(None), before, DONE, changed=True)[0] == "live"
    assert judge(up(None, None), Want(None, ("DFLASH",)), before, DONE, changed=True)[0] == "other"
    assert judge(up(None, None), Want(None, (None,)), before, DONE, changed=True)[0] == "live"


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({}, {}, None),
        ({7: 10.0}, {7: 10.0}, False),
        ({7: 10.0}, {8: 20.0}, True),
        ({7: 10.0}, {7: 10.0, 8: 20.0}, True),
        ({7: 10.0}, {}, True),
        ({7: 10.0}, {7: 500.0}, True),
    ],
)
def test_replaced(before: dict[int, float], after: dict[int, float], expected: bool | None):
    """A pid that is used again is another process; where none can be seen nothing is claimed."""
    assert replaced(before, after) is expected


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("started with --api-key hush --port 1", "started with --api-key *** --port 1"),
        ("--admin-api-key=hush", "--admin-api-key=***"),
        ("Authorization: Bearer hush", "Authorization: Bearer ***"),
        ("HF_TOKEN=hush exported", "HF_TOKEN=*** exported"),
        ("{'api_key': 'hush', 'port': 1}", "{'api_key': ***, 'port': 1}"),
        ('"hf_token": "hush hush"', '"hf_token": ***'),
        ("--tokenizer-path /models/a", "--tokenizer-path /models/a"),
        ("loading \x1b[31mred", "loading ?[31mred"),
    ],
)
def test_secrets_in_the_output_of_a_restart_are_blotted_out(line: str, shown: str):
    """What a restart prints is shown to the operator and kept in the history."""
    assert blotted(line) == shown


def test_a_unit_is_reset_first_and_a_command_is_quoted():
    """The manual lines are those that the host runs (microduck#143)."""
    assert commands({"unit": "a.service", "restart": []})[0] == ["systemctl", "reset-failed", "a.service"]
    assert manual({"unit": None, "restart": ["docker", "restart", "my web"]}) == ["docker restart 'my web'"]
