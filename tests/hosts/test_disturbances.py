# SPDX-License-Identifier: Apache-2.0
"""Signals and errors at every step of the agent: it goes through, or the tree is as before."""

from __future__ import annotations

import errno
import os
import signal

import pytest
from tests.support.crashes import Step, disturbed
from tests.support.stages import (
    fault,
    package,
)
from tests.support.trees import differences, listing

from ddtree_overlay.remote import agent


FREEING = ("flock", "remove", "rmdir", "fsync")


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
