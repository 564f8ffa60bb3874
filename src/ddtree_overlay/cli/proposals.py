# SPDX-License-Identifier: Apache-2.0
"""What the verbs for several hosts have in common: connections, threads, one table, one question, one closing table."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ddtree_overlay.cli.options import App
from ddtree_overlay.cli.selecting import Fleet, Target
from ddtree_overlay.errors import OverlayError, RollbackIncompleteError
from ddtree_overlay.reports import counted, listed, row


if TYPE_CHECKING:
    from ddtree_overlay.crew import Crew
    from ddtree_overlay.fleet import Outcome
    from ddtree_overlay.fleet_reports import Row
    from ddtree_overlay.hosts.transport import AgentTransport


R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a verb is about to do on each host of a fleet, and what it says before, instead and afterwards."""

    app: App
    fleet: Fleet
    command: str
    rows: Mapping[str, Row]
    errors: Mapping[str, OverlayError]
    plans: Mapping[str, Mapping[str, Any]]
    current: frozenset[str]
    restart: bool = False

    def show(self, remarks: Mapping[str, Iterable[str]]) -> None:
        """Print the table that the question is about, and every refusal in full."""
        from ddtree_overlay.fleet_reports import fleet_plan_lines

        title = f"{self.fleet.label}: {self.command} on {counted(len(self.fleet.targets), 'host')}"
        found = {t.name: self.rows.get(t.name) or self.errors[t.name] for t in self.fleet.targets}
        self.app.screen.ask_lines(fleet_plan_lines(self.command, title, found, self.current, remarks))
        for name, error in self.errors.items():
            self.app.screen.complain(error, about=name)

    def settled(self, question: str, *, yes: bool, dry_run: bool, options: str = "") -> int | None:
        """The exit code when there is nothing more to do, or nothing may be done; else None.

        Args:
            question: What is asked, but for the hosts.
            yes: Do not ask.
            dry_run: Only show.
            options: What belongs into the command that is advised.
        """
        from ddtree_overlay.fleet import Outcome, exit_code

        if self.errors:
            refused = [Outcome(name, "refused", e) for name, e in self.errors.items()]
            able = self._concerned()
            if able:
                others = self.fleet.command_for(self.command, able) + options + self._restarting(" --restart")
                self.app.screen.note(f"without the hosts that refuse: {others}")
            untouched = [Outcome(name, "untouched") for name in self.rows if name not in self.current]
            return self.close([*refused, *untouched], exit_code(refused), dry_run=dry_run)
        if not self._concerned():
            return self.close([], 0, dry_run=dry_run)
        if dry_run:
            value = self._value([], {}, dry_run=True)
            return self.app.finish(self.command, value, [row(("Dry run: nothing was written.", "dim"))])
        return None if yes else self._declined(question, options)

    def _concerned(self) -> list[str]:
        """The hosts on which anything is going to happen: a push with a restart proves also those up to date."""
        proves = self.restart and self.command == "push"
        return [name for name in self.rows if proves or name not in self.current]

    def _restarting(self, text: str) -> str:
        return text if self.restart else ""

    def _declined(self, question: str, options: str) -> int | None:
        """Ask about the hosts that are going to be changed, by name; None when the answer is yes."""
        again = f"{self.fleet.command(self.command)}{options}{self._restarting(' --restart')} --yes"
        asked = f"{question} {listed(self._concerned(), 8)}{self._restarting(' and restart the servers')}?"
        if self.app.screen.confirm(asked, next_step=again):
            return None
        self.app.screen.note("nothing was changed")
        return self.app.finish(self.command, {**self._value([], {}, dry_run=False), "declined": True}, [], code=1)

    def close(
        self,
        outcomes: Sequence[Outcome],
        code: int,
        *,
        done: str = "",
        dry_run: bool = False,
        details: Mapping[str, Mapping[str, Any]] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> int:
        """Say what is true of each host now; `details` go into the JSON object, `labels` into the table."""
        from ddtree_overlay import fleet_reports
        from ddtree_overlay.fleet import Outcome

        known = {o.host: o for o in outcomes}
        every = [known.get(t.name, Outcome(t.name, "current")) for t in self.fleet.targets]
        for outcome in every:
            if outcome.error and outcome.host not in self.errors:
                self.app.screen.complain(self._advised(outcome), about=outcome.host)
        title = fleet_reports.closing(self.fleet.label, every, code, done)
        lines = fleet_reports.outcome_lines(self.command, title, every, self.rows, labels or {})
        value = self._value(every, details or {}, dry_run=dry_run)
        wrote = any(o.fate not in {"untouched", "refused", "current"} for o in every)
        return self.app.finish(self.command, value, lines, code, wrote=wrote)

    def _advised(self, outcome: Outcome) -> OverlayError:
        """The error, with the commands that get a host further that is not as it was."""
        error = outcome.error
        assert error is not None
        target = next(t for t in self.fleet.targets if t.name == outcome.host)
        error.next_step = error.next_step.replace("{target}", target.flag)
        if outcome.fate in {"incomplete", "unknown"} and not isinstance(error, RollbackIncompleteError):
            before = self.plans.get(outcome.host, {}).get("deployment") or "base"
            goal = "" if self.command == "rollback" else f", then {target.command('rollback')} --to {before}"
            error.next_step = target.command("status") + goal
        return error

    def _value(
        self, outcomes: Sequence[Outcome], details: Mapping[str, Mapping[str, Any]], *, dry_run: bool
    ) -> dict[str, Any]:
        known = {o.host: o for o in outcomes}
        hosts = []
        for target in self.fleet.targets:
            planned, outcome = self.rows.get(target.name), known.get(target.name)
            error = outcome.error if outcome else self.errors.get(target.name)
            hosts.append(
                {
                    "host": target.name,
                    "fate": outcome.fate if outcome else None,
                    "before": planned.before if planned else None,
                    "after": planned.after if planned else None,
                    "plan": self.plans.get(target.name),
                    "deployment": None,
                    "proof": None,
                    "error": error.as_dict() if error else None,
                    **details.get(target.name, {}),
                }
            )
        changed = any(o.fate in {"changed", "incomplete", "unknown"} for o in outcomes)
        return {"fleet": self.fleet.label, "changed": changed, "dry_run": dry_run, "hosts": hosts}


def crew_of(app: App, parallel: int) -> Crew:
    """Threads whose lines are notes on stderr."""
    from ddtree_overlay.crew import Crew

    return Crew(parallel, lambda name, text: app.screen.note(f"{name}: {text}" if name else text))


def divided(fleet: Fleet, results: Mapping[str, R | OverlayError]) -> tuple[dict[str, R], dict[str, OverlayError]]:
    """Answers and errors by name, in the fleet's order."""
    answers: dict[str, R] = {}
    errors: dict[str, OverlayError] = {}
    for target in fleet.targets:
        found = results[target.name]
        if isinstance(found, OverlayError):
            found.next_step = found.next_step.replace("{target}", target.flag)
            errors[target.name] = found
        else:
            answers[target.name] = found
    return answers, errors


@contextlib.contextmanager
def connections(app: App, fleet: Fleet) -> Iterator[Callable[[Target], AgentTransport]]:
    """One transport a host, which connects at its first call; what they noticed is said at the end."""
    from ddtree_overlay.hosts.transport import open_transport

    opened = {t.name: open_transport(t.place, accept_new=app.accept_new) for t in fleet.targets}
    for target in fleet.targets:
        opened[target.name].target = target.flag
    try:
        yield lambda target: opened[target.name]
    finally:
        for name, transport in opened.items():
            transport.close()
            for text in transport.warnings:
                app.screen.warn(text if text.startswith(f"{name}:") else f"{name}: {text}")
