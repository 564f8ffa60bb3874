# SPDX-License-Identifier: Apache-2.0
"""A change of several hosts, all or none: the order of the steps, what became of each host, and the exit code.

Every host is staged and checked before the first one is swapped. Then they are swapped in waves, a wave being proven
before the next one begins. Whatever fails at one host, all that were swapped are put back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ddtree_overlay.crew import Crew, FaultError, GivenUpError, Named, Say
from ddtree_overlay.errors import (
    ConnectionFailedError,
    OverlayError,
    RollbackIncompleteError,
    RolledBackError,
)


#: What became of a host.
#:
#: untouched   nothing was changed there, because of another host or because it was not reached in time
#: refused     nothing was changed there, because it refused or could not be reached
#: current     nothing was changed there, because it had the overlay already
#: changed     the change was carried out and stands
#: undone      the change was carried out, or begun, and everything was put back
#: incomplete  it was changed, and not everything could be put back
#: unknown     contact was lost while it was changed, and not regained
Fate = Literal["untouched", "refused", "current", "changed", "undone", "incomplete", "unknown"]

#: Of several reasons for which nothing was changed, the first one here decides the exit code.
_WORST_FIRST = (8, 4, 1, 5, 2, 3)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one host; `error` is what went wrong there, None when the cause lies elsewhere."""

    host: str
    fate: Fate
    error: OverlayError | None = None

    def as_dict(self) -> dict[str, Any]:
        """The outcome as `--json` prints it."""
        return {"host": self.host, "fate": self.fate, "error": self.error.as_dict() if self.error else None}


class Member(Protocol):
    """A host of a fleet. Each step may raise an OverlayError; `say` tells a line about the host."""

    @property
    def name(self) -> str:
        """The host's name."""
        ...

    def stage(self, say: Say) -> None:
        """Bring what the change needs to the host and check that it can be carried out; change nothing."""

    def unstage(self, say: Say) -> None:
        """Remove what `stage` brought."""

    def swap(self, say: Say) -> None:
        """Carry out the change."""

    def prove(self, say: Say) -> None:
        """Restart the server and wait until it shows that the change is live."""

    def undo(self, say: Say) -> None:
        """Go back to exactly what was before `swap`, whatever it has done, and unstage; connect again if needed."""


def exit_code(outcomes: Iterable[Outcome], *, interrupted: bool = False) -> int:
    """The exit code that says the worst of what happened."""
    outcomes = tuple(outcomes)
    fates = {o.fate for o in outcomes}
    if fates & {"incomplete", "unknown"}:
        return RollbackIncompleteError.exit_code
    if interrupted:
        return GivenUpError.exit_code
    codes = {o.error.exit_code for o in outcomes if o.error}
    if codes and "undone" in fates:
        return RolledBackError.exit_code
    return worst(codes)


def worst(codes: Iterable[int]) -> int:
    """The exit code that speaks for all of `codes`: what was left half done first, then what keeps one from knowing."""
    found = set(codes) - {0}
    order = (RollbackIncompleteError.exit_code, RolledBackError.exit_code, *_WORST_FIRST)
    return next((code for code in order if code in found), max(found, default=0))


def fates(members: Sequence[Named], results: Mapping[str, OverlayError | None]) -> list[Outcome]:
    """What became of hosts that were each changed for themselves; who has no result was not begun with."""
    return [
        Outcome(m.name, _after_swap(results[m.name]), results[m.name])
        if m.name in results
        else Outcome(m.name, "untouched")
        for m in members
    ]


def waves(members: Sequence[Member], canaries: int) -> list[Sequence[Member]]:
    """The first `canaries` hosts, then the others."""
    return [wave for wave in (members[:canaries], members[canaries:]) if wave]


def roll_out(members: Sequence[Member], crew: Crew, *, canaries: int = 0, proving: bool = False) -> list[Outcome]:
    """Stage all of `members`, then swap them in waves; put all of them back if anything fails.

    Args:
        members: The hosts that have something to change.
        crew: Who does the work, and notices Ctrl-C.
        canaries: This many of the first hosts are swapped, and proven, before the others are touched.
        proving: Restart each wave and wait until it has proven itself.

    Returns:
        What became of each host, in the order of `members`.
    """
    change = _Change(crew)
    staged = crew.each(members, lambda m, say: m.stage(say))
    change.refused(staged)
    if not change.failed and not crew.interrupted:
        for wave in waves(members, canaries):
            change.swap(wave)
            if proving and not change.failed and not crew.interrupted:
                change.prove(wave)
            if change.failed or crew.interrupted:
                break
    if change.failed or crew.interrupted:
        change.undo(members)
        # An undo takes its stage away, and a host that could not be reached would only be waited for again.
        left = [m for m in members if staged.get(m.name, m) is None and change.fate_of(m) in {"untouched", "refused"}]
        for name, error in crew.each(left, lambda m, say: m.unstage(say), stubborn=True).items():
            if error is not None:
                crew.tell(name, f"its staged files are left to the next push to remove: {error.what}")
    return [change.outcome(m) for m in members]


class _Change:
    """The book that is kept about a change while it runs."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._fates: dict[str, Fate] = {}
        self._errors: dict[str, OverlayError] = {}

    @property
    def failed(self) -> bool:
        """Whether anything has gone wrong anywhere."""
        return bool(self._errors)

    def fate_of(self, member: Member) -> Fate:
        """What has become of a host so far."""
        return self._fates.get(member.name, "untouched")

    def outcome(self, member: Member) -> Outcome:
        """The closing entry of a host."""
        return Outcome(member.name, self.fate_of(member), self._errors.get(member.name))

    def refused(self, results: Mapping[str, OverlayError | None]) -> None:
        """Note who could not be staged."""
        for name, error in results.items():
            if error is not None:
                self._fates[name] = "refused"
                self._errors[name] = error

    def swap(self, wave: Sequence[Member]) -> None:
        """Swap a wave; once one has failed, no other is begun with."""
        results = self._crew.each(wave, lambda m, say: m.swap(say), halt=True)
        for name, error in results.items():
            self._fates[name] = _after_swap(error)
            if error is not None:
                self._errors[name] = error

    def prove(self, wave: Sequence[Member]) -> None:
        """Restart a wave and wait for it."""
        results = self._crew.each(wave, lambda m, say: m.prove(say), halt=True)
        self._errors.update({name: error for name, error in results.items() if error is not None})

    def undo(self, members: Sequence[Member]) -> None:
        """Put back all that were swapped, and those of which it is not known."""
        touched = [m for m in members if self.fate_of(m) in {"changed", "unknown"}]
        results = self._crew.each(touched, lambda m, say: m.undo(say), stubborn=True)
        for member in touched:
            error = results.get(member.name, GivenUpError(f"{member.name}: it was not put back"))
            known = member.name not in results and self.fate_of(member) == "changed"
            self._fates[member.name] = "incomplete" if known else _after_undo(error)
            if error is not None:
                self._errors[member.name] = _with_cause(error, self._errors.get(member.name))


def _after_swap(error: OverlayError | None) -> Fate:
    if error is None:
        return "changed"
    if isinstance(error, RolledBackError):
        return "undone"
    if isinstance(error, RollbackIncompleteError):
        return "incomplete"
    # A lost connection says nothing about what the agent went on to do.
    return "unknown" if isinstance(error, (ConnectionFailedError, FaultError, GivenUpError)) else "refused"


def _after_undo(error: OverlayError | None) -> Fate:
    if error is None:
        return "undone"
    return "unknown" if isinstance(error, (ConnectionFailedError, GivenUpError)) else "incomplete"


def _with_cause(error: OverlayError, first: OverlayError | None) -> OverlayError:
    """The failure to put a host back, with what had gone wrong there before."""
    if first is None:
        return error
    why = "; ".join(part for part in (error.why, f"before that: {first.what}") if part)
    return type(error)(error.what, why=why, next_step=error.next_step)
