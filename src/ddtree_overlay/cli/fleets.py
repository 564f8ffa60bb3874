# SPDX-License-Identifier: Apache-2.0
"""`push`, `rollback` and `status` of several hosts: the same verbs, with one table and one question for all of them."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ddtree_overlay.cli.options import App
from ddtree_overlay.cli.selecting import Fleet, Target
from ddtree_overlay.cli.targets import bundles, operator
from ddtree_overlay.errors import OverlayError, RollbackIncompleteError, UsageError
from ddtree_overlay.reports import counted, listed, row


if TYPE_CHECKING:
    from ddtree_overlay.crew import Crew
    from ddtree_overlay.fleet import Outcome
    from ddtree_overlay.fleet_reports import Row
    from ddtree_overlay.hosts.transport import AgentTransport
    from ddtree_overlay.members import PushMember


R = TypeVar("R")
PARALLEL = click.Option(
    ["--parallel"],
    type=click.IntRange(1, 256),
    default=8,
    show_default=True,
    metavar="N",
    help="Of several hosts, work on at most N at a time.",
)
CANARY = click.Option(
    ["--canary"],
    type=click.IntRange(1),
    default=None,
    metavar="N",
    help="Change, restart and prove the first N of several hosts before the others.",
)


def push_to_fleet(
    app: App,
    fleet: Fleet,
    *,
    yes: bool,
    dry_run: bool,
    lock_wait: float,
    parallel: int,
    canary: int | None,
    restart: bool = False,
) -> int:
    """Plan on all hosts, one table, one question; stage on all, then swap all, or none."""
    from ddtree_overlay import fleet_reports, members

    if canary and not restart:
        raise UsageError(
            "--canary waits until the first hosts have proven themselves, and they cannot without a restart",
            next_step="add --restart, or leave --canary out",
        )
    stored, crew = bundles(app, fleet), crew_of(app, parallel)
    with connections(app, fleet) as reach:
        app.screen.note(f"{fleet.label}: planning on {counted(len(fleet.targets), 'host')}")
        found, errors = divided(fleet, crew.each(fleet.targets, lambda t, _: members.look_ahead(reach(t), stored)))
        members.refuse_twins((name, p.place) for name, p in found.items())
        rows = {name: fleet_reports.push_row(p.status, p.plan) for name, p in found.items()}
        plans = {name: p.plan.as_dict() for name, p in found.items()}
        current = frozenset(name for name, p in found.items() if p.is_current)
        proposal = Proposal(app, fleet, "push", rows, errors, plans, current)
        proposal.show({name: fleet_reports.remarks_on(p.plan) for name, p in found.items()})
        code = proposal.settled(dry_run=dry_run)
        if code is None and not yes and not proposal.confirmed("Push to", f"{fleet.command('push')} --yes"):
            code = proposal.declined()
        if code is not None:
            return code
        stage = secrets.token_hex(8)
        team = [
            members.PushMember(reach(t), found[t.name], stage=stage, operator=operator(), lock_wait=lock_wait)
            for t in fleet.targets
            if t.name not in current
        ]
        return _push_team(proposal, crew, team, canaries=canary or 0, proving=restart)


def _push_team(proposal: Proposal, crew: Crew, team: Sequence[PushMember], *, canaries: int, proving: bool) -> int:
    from ddtree_overlay.fleet import exit_code, roll_out

    with crew.minding_interrupts():
        outcomes = roll_out(team, crew, canaries=canaries, proving=proving)
    stands = {o.host for o in outcomes if o.fate == "changed"}
    deployments = {m.name: m.deployment.as_dict() for m in team if m.deployment and m.name in stands}
    code = exit_code(outcomes, interrupted=crew.interrupted)
    return proposal.close(outcomes, deployments, code, done="pushed to")


def rollback_of_fleet(
    app: App,
    fleet: Fleet,
    *,
    to: str | None,
    purge: bool,
    yes: bool,
    dry_run: bool,
    lock_wait: float,
    parallel: int,
    restart: bool = False,
) -> int:
    """Plan on all hosts, one table, one question; then roll back all of them."""
    refuse_purge(to, purge=purge, restart=restart)
    if restart:
        raise UsageError(
            "--restart works on one host at a time when rolling back",
            next_step=f"{fleet.command('rollback')} without --restart, then restart and check each server",
        )
    from ddtree_overlay import fleet_reports, members
    from ddtree_overlay.fleet import exit_code, fates

    crew = crew_of(app, parallel)
    with connections(app, fleet) as reach:
        app.screen.note(f"{fleet.label}: planning on {counted(len(fleet.targets), 'host')}")
        found, errors = divided(
            fleet, crew.each(fleet.targets, lambda t, _: members.look_back(reach(t), to=to, purge=purge))
        )
        members.refuse_twins((name, r.place) for name, r in found.items())
        rows = {name: fleet_reports.rollback_row(r.status, r.plan, r.goal) for name, r in found.items()}
        plans = {name: r.plan.as_dict() for name, r in found.items()}
        current = frozenset(name for name, r in found.items() if r.is_current)
        proposal = Proposal(app, fleet, "rollback", rows, errors, plans, current)
        proposal.show({name: fleet_reports.remarks_on(r.plan) for name, r in found.items()})
        options = (f" --to {to}" if to else "") + (" --purge" if purge else "")
        code = proposal.settled(dry_run=dry_run, options=options)
        again = f"{fleet.command('rollback')}{options} --yes"
        if code is None and not yes and not proposal.confirmed("Roll back", again):
            code = proposal.declined()
        if code is not None:
            return code
        todo = [t for t in fleet.targets if t.name not in current]
        with crew.minding_interrupts():
            results = crew.each(
                todo,
                lambda t, say: members.roll_back(
                    reach(t), found[t.name], operator=operator(), lock_wait=lock_wait, say=say
                ),
            )
        outcomes = fates(todo, results)
        return proposal.close(outcomes, {}, exit_code(outcomes, interrupted=crew.interrupted), done="rolled back")


def refuse_purge(to: str | None, *, purge: bool, restart: bool = False) -> None:
    """Refuse to remove backups and history, and to go back to one of them or to need them for a restart."""
    if purge and restart:
        raise UsageError(
            "--purge does not go with --restart: the state folder is needed until the server is well",
            next_step="roll back with --to base --restart first, then with --purge",
        )
    if purge and to not in {None, "base"}:
        raise UsageError(f"--purge goes back to the base, not to {to}", next_step="leave --to or --purge out")


def status_of_fleet(app: App, fleet: Fleet, *, exit_code: bool, parallel: int) -> int:
    """One overlay id for all hosts, or SKEW and who has what."""
    from ddtree_overlay import deploy, fleet_reports
    from ddtree_overlay.fleet import worst

    with connections(app, fleet) as reach:
        results = crew_of(app, parallel).each(fleet.targets, lambda target, _: deploy.status(reach(target)))
    statuses, errors = divided(fleet, results)
    for name, error in errors.items():
        app.screen.complain(error, about=name)
    skewed = fleet_reports.is_skewed(statuses.values())
    settled = not errors and not skewed and all(fleet_reports.is_settled(s) for s in statuses.values())
    names = [t.name for t in fleet.targets]
    value = {
        "fleet": fleet.label,
        "overlay_id": None if skewed else next((s.overlay_id for s in statuses.values()), None),
        "skew": skewed,
        "settled": settled,
        "hosts": [
            {
                "host": name,
                "status": statuses[name].as_dict() if name in statuses else None,
                "error": errors[name].as_dict() if name in errors else None,
            }
            for name in names
        ],
    }
    code = worst(e.exit_code for e in errors.values()) or (3 if exit_code and not settled else 0)
    return app.finish("status", value, fleet_reports.fleet_status_lines(fleet.label, names, statuses, errors), code)


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

    def show(self, remarks: Mapping[str, Iterable[str]]) -> None:
        """Print the table that the question is about, and every refusal in full."""
        from ddtree_overlay.fleet_reports import fleet_plan_lines

        title = f"{self.fleet.label}: {self.command} on {counted(len(self.fleet.targets), 'host')}"
        found = {t.name: self.rows.get(t.name) or self.errors[t.name] for t in self.fleet.targets}
        self.app.screen.ask_lines(fleet_plan_lines(self.command, title, found, self.current, remarks))
        for name, error in self.errors.items():
            self.app.screen.complain(error, about=name)

    def settled(self, *, dry_run: bool, options: str = "") -> int | None:
        """The exit code when there is nothing more to do, or nothing may be done; else None."""
        from ddtree_overlay.fleet import Outcome, exit_code

        if self.errors:
            refused = [Outcome(name, "refused", e) for name, e in self.errors.items()]
            able = [name for name in self.rows if name not in self.current]
            if able:
                others = self.fleet.command_for(self.command, able) + options
                self.app.screen.note(f"without the hosts that refuse: {others}")
            untouched = [Outcome(name, "untouched") for name in self.rows if name not in self.current]
            return self.close([*refused, *untouched], {}, exit_code(refused), dry_run=dry_run)
        if len(self.current) == len(self.rows):
            return self.close([], {}, 0, dry_run=dry_run)
        if dry_run:
            value = self._value([], {}, dry_run=True)
            return self.app.finish(self.command, value, [row(("Dry run: nothing was written.", "dim"))])
        return None

    def confirmed(self, question: str, again: str) -> bool:
        """Ask about the hosts that are going to be changed, by name."""
        names = [name for name in self.rows if name not in self.current]
        return self.app.screen.confirm(f"{question} {listed(names, 8)}?", next_step=again)

    def declined(self) -> int:
        """Nothing is done, because the user said so."""
        self.app.screen.note("nothing was changed")
        return self.app.finish(self.command, {**self._value([], {}, dry_run=False), "declined": True}, [], code=1)

    def close(
        self,
        outcomes: Sequence[Outcome],
        deployments: Mapping[str, Mapping[str, Any]],
        code: int,
        *,
        done: str = "",
        dry_run: bool = False,
    ) -> int:
        """Say what is true of each host now."""
        from ddtree_overlay import fleet_reports
        from ddtree_overlay.fleet import Outcome

        known = {o.host: o for o in outcomes}
        every = [known.get(t.name, Outcome(t.name, "current")) for t in self.fleet.targets]
        for outcome in every:
            if outcome.error and outcome.host not in self.errors:
                self.app.screen.complain(self._advised(outcome), about=outcome.host)
        labels = {name: f"{d['id']} ({d['state']})" for name, d in deployments.items()}
        title = fleet_reports.closing(self.fleet.label, every, code, done)
        lines = fleet_reports.outcome_lines(self.command, title, every, self.rows, labels)
        value = self._value(every, deployments, dry_run=dry_run)
        return self.app.finish(self.command, value, lines, code)

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
        self, outcomes: Sequence[Outcome], deployments: Mapping[str, Mapping[str, Any]], *, dry_run: bool
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
                    "deployment": deployments.get(target.name),
                    "error": error.as_dict() if error else None,
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
