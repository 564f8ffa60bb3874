# SPDX-License-Identifier: Apache-2.0
"""Hosts as members of a fleet: what each step of a push to several hosts does on one of them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ddtree_overlay import answers, deploy, proving
from ddtree_overlay.crew import Say
from ddtree_overlay.errors import (
    ConflictError,
    ConnectionFailedError,
    OverlayError,
    RollbackIncompleteError,
    UsageError,
)
from ddtree_overlay.hosts.transport import AgentTransport
from ddtree_overlay.plans import Deployment, PushPlan, RollbackPlan, Status
from ddtree_overlay.proving import Proof
from ddtree_overlay.workspace import StoredBundle


R = TypeVar("R")
#: Seconds for which an undo waits for the host's lock, and between two attempts to reach a host again.
UNDO_LOCK_WAIT = 60.0
RETRY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Prospect:
    """A host as it is, and what a push would do there. `place` is the same for two names of one package."""

    status: Status
    place: tuple[str, ...]
    plan: PushPlan
    files: Mapping[str, bytes]

    @property
    def is_current(self) -> bool:
        """Whether there is nothing to do."""
        return self.plan.is_noop and not self.plan.unfinished


def look_ahead(
    transport: AgentTransport, stored: Sequence[StoredBundle], say: Say, *, restart: bool = False
) -> Prospect:
    """See what is on a host and plan a push of the bundle that fits, and whether it could be restarted; change nothing.

    Raises:
        ConflictError: No bundle fits, or there would be no way back to exactly what is there.
        OverlayError: The host refuses the plan.
    """
    seen = transport.call("survey", {}).result
    status = answers.status_of(transport, seen)
    plan, chosen = deploy.plan_push_of(transport, stored)
    plan.check()
    if restart:
        proving.check(transport)
    found = Prospect(status, tuple(seen["place"]), plan, chosen.files())
    say("planned")
    # After an interrupted run the host says so itself, once it has put things back.
    if not found.is_current and not status.unfinished and status.state not in {"pristine", "applied"}:
        step = f"ddtree-overlay push {transport.target} alone, or ddtree-overlay rollback {transport.target}"
        raise ConflictError(
            f"{transport.name} is {status.state}: {status.reason}",
            why="if another host failed, this one could not be put back to exactly what it is now",
            next_step=f"{step} --purge" if status.state == "upgraded" else step,
        )
    return found


@dataclass(frozen=True, slots=True)
class Retrospect:
    """A host as it is, and what a rollback would do there; `goal` is the overlay that it goes back to."""

    status: Status
    place: tuple[str, ...]
    plan: RollbackPlan
    goal: str | None

    @property
    def is_current(self) -> bool:
        """Whether there is nothing to do."""
        return self.plan.is_noop and not self.plan.unfinished


def look_back(transport: AgentTransport, *, to: str | None, purge: bool, say: Say, restart: bool = False) -> Retrospect:
    """See what is on a host and plan a rollback; nothing is written.

    Raises:
        OverlayError: The host refuses the plan.
    """
    seen = transport.call("survey", {}).result
    plan = deploy.plan_rollback(transport, to=to, purge=purge)
    plan.check()
    if restart:
        proving.check(transport)
    goal = None
    if plan.to != "base":
        goal = next((d.overlay_id for d in deploy.history(transport) if d.id == plan.to), None)
    say("planned")
    return Retrospect(answers.status_of(transport, seen), tuple(seen["place"]), plan, goal)


def roll_back(
    transport: AgentTransport, found: Retrospect, *, operator: str, lock_wait: float, restart: bool, say: Say
) -> None:
    """Carry out a rollback, and restart and prove if `restart`. Raises as `proving.rollback`."""
    if restart:
        done, proof = proving.rollback(transport, found.plan, operator=operator, progress=say, lock_wait=lock_wait)
        after = f", live: {proof.why}"
    else:
        done = deploy.rollback(transport, plan=found.plan, operator=operator, lock_wait=lock_wait, progress=say)
        after = ", backups and history removed" if done.purged else ""
    say(f"back to {done.to}, {done.verified} files verified{after}")


def refuse_twins(places: Iterable[tuple[str, tuple[str, ...]]]) -> None:
    """Refuse hosts that lead to the same package on the same machine: they would be changed twice.

    Raises:
        UsageError: Two names do.
    """
    names: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, place in places:
        if place:
            names[place].append(name)
    for same in names.values():
        if len(same) > 1:
            raise UsageError(
                f"{' and '.join(same)} are the same SGLang on the same machine",
                why="nothing was changed",
                next_step=f"name only one of them, or take the others out of the group in deploy.toml: {same[0]}",
            )


class PushMember:
    """A host that is to be pushed to together with others. One that has the overlay already only proves it."""

    def __init__(
        self, transport: AgentTransport, prospect: Prospect, *, stage: str, operator: str, lock_wait: float
    ) -> None:
        self.transport = transport
        self.prospect = prospect
        self.deployment: Deployment | None = None
        self.proof: Proof | None = None
        self._stage = stage
        self._operator = operator
        self._lock_wait = lock_wait
        #: Seconds for which a way back waits for whatever still runs on the host.
        self._undo_wait = UNDO_LOCK_WAIT
        self._restarted = False

    @property
    def name(self) -> str:
        """The host's name."""
        return self.transport.name

    @property
    def before(self) -> str:
        """The deployment that was live before, or "base"."""
        return self.prospect.plan.deployment or "base"

    def stage(self, say: Say) -> None:
        """Bring the files into the host's state folder; all that can refuse the push is checked there."""
        if self.prospect.is_current:
            return
        plan = self.prospect.plan
        args, payload = deploy.push_request(
            plan, self.prospect.files, operator=self._operator, lock_wait=self._lock_wait
        )
        self.transport.call("stage", {**args, "stage": self._stage}, payload, progress=say)
        say("staged and checked")

    def unstage(self, _: Say) -> None:
        """Remove what `stage` brought."""
        if self.prospect.is_current:
            return
        args = {"stage": self._stage, "operator": self._operator, "lock_wait": self._undo_wait}
        self.transport.call("unstage", args)

    def swap(self, say: Say) -> None:
        """Carry out the plan with the staged files."""
        if self.prospect.plan.is_noop:
            # What an interrupted run had left was put right when the files were staged.
            self.unstage(say)
            return
        self.deployment = deploy.push(
            self.transport,
            self.prospect.plan,
            self.prospect.files,
            operator=self._operator,
            lock_wait=self._lock_wait,
            stage=self._stage,
            progress=say,
        )
        say(f"swapped, {self.deployment.id} with {self.deployment.files} files verified")

    def prove(self, say: Say) -> None:
        """Restart the server and wait until it runs the overlay; one that does already is left alone.

        Raises:
            OverlayError: It does not come up with it, or was not restarted at all.
        """
        if self.deployment is None:
            plan, files = self.prospect.plan, self.prospect.files
            _, self.proof = proving.push(
                self.transport, plan, files, operator=self._operator, progress=say, lock_wait=self._lock_wait
            )
        else:
            self._restart(self.deployment, say)
        say(f"live: {self.proof.why if self.proof else ''}")

    def _restart(self, deployment: Deployment, say: Say) -> None:
        trial = proving.trial_of(self.transport.host)
        self._undo_wait = UNDO_LOCK_WAIT + trial["restart_timeout"] + trial["timeout"]
        # As long as nobody has said otherwise.
        self._restarted = True
        self.proof = proving.prove(self.transport, deployment, restart=True, progress=say, operator=self._operator)
        self._restarted = self.proof.restarted
        self.deployment = proving.settle(self.transport, deployment, self.proof, operator=self._operator)
        if not self.proof.ok:
            raise OverlayError(
                f"{self.name}: the server does not run {deployment.id}: {self.proof.why}",
                why="; ".join(a for a in self.proof.answers[-3:] if a not in self.proof.why),
                next_step=f"read the server's log on {self.name}, and .ddtree-overlay/restart.log beside the package; "
                f"then ddtree-overlay history {self.transport.target}",
            )

    def undo(self, say: Say) -> None:
        """Go back to the deployment before, if the push got through, and see that every file is as it was.

        Raises:
            ConnectionFailedError: The host cannot be reached again.
            RollbackIncompleteError: Not everything is as it was.
            OverlayError: The rollback was refused.
        """
        # Without its stage a push that was sent, and whose answer was lost, cannot begin any more; one that has begun
        # holds the lock, and is waited for.
        self._patiently(lambda: self.unstage(say))
        found = self._patiently(lambda: deploy.status(self.transport))
        live = found.deployment
        swapped = live is not None and live.id != self.prospect.plan.deployment
        if not swapped and not found.unfinished:
            say("nothing was swapped")
            return
        if live and swapped:
            self._refuse_others(live)
        plan = deploy.plan_rollback(self.transport, to=self.before)
        if self._restarted:
            _, proof = proving.rollback(
                self.transport, plan, operator=self._operator, progress=say, lock_wait=self._undo_wait
            )
        else:
            deploy.rollback(self.transport, plan=plan, operator=self._operator, lock_wait=self._undo_wait)
        if swapped:
            self._compare(plan)
        served = f", live: {proof.why}" if self._restarted else ""
        say(f"rolled back to {self.before}, every file verified{served}")

    def _patiently(self, ask: Callable[[], R]) -> R:
        """The answer of a host that may have been lost for a moment."""
        end = time.monotonic() + self.transport.host.timeout
        while True:
            try:
                return ask()
            except ConnectionFailedError:
                if time.monotonic() > end:
                    raise
            time.sleep(RETRY_SECONDS)

    def _refuse_others(self, live: Deployment) -> None:
        mine = self.deployment
        if live.id == mine.id if mine else self._looks_like_ours(live):
            return
        raise RollbackIncompleteError(
            f"{self.name}: {live.operator} has pushed {live.id} meanwhile",
            why="going back would undo that as well",
            next_step=f"ddtree-overlay history {self.transport.target}",
        )

    def _looks_like_ours(self, live: Deployment) -> bool:
        return live.operator == self._operator and live.overlay_id == self.prospect.plan.overlay_id

    def _compare(self, plan: RollbackPlan) -> None:
        """The host has verified what it put back; see that this is what was there when the push was planned."""
        after = {a.path: a.sha256 for a in plan.actions}
        moved = [a for a in self.prospect.plan.actions if a.action != "same"]
        wrong = [a.path for a in moved if after.get(a.path) != a.live_sha256]
        if wrong:
            raise RollbackIncompleteError(
                f"{self.name}: back to {self.before}, but not to the files that were there: {', '.join(wrong)}",
                next_step=f"ddtree-overlay status {self.transport.target}",
            )
