# SPDX-License-Identifier: Apache-2.0
"""`push`, `rollback` and `status` of several hosts: the same verbs, with one table and one question for all of them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ddtree_overlay.cli.options import App
from ddtree_overlay.cli.proposals import Proposal, connections, crew_of, divided
from ddtree_overlay.cli.proving import require_restart
from ddtree_overlay.cli.selecting import Fleet, Target
from ddtree_overlay.cli.targets import bundles, operator
from ddtree_overlay.errors import OverlayError, UsageError
from ddtree_overlay.reports import counted


if TYPE_CHECKING:
    from ddtree_overlay.crew import Crew, Say
    from ddtree_overlay.fleet import Outcome
    from ddtree_overlay.members import Prospect, PushMember, Retrospect


P = TypeVar("P", bound="Prospect | Retrospect")
PARALLEL = click.Option(
    ["--parallel"],
    type=click.IntRange(1, 256),
    default=8,
    show_default=True,
    metavar="N",
    help="Of several hosts, work on (and restart) at most N at a time.",
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
    restart: bool,
) -> int:
    """Plan on all hosts, one table, one question; stage on all, then swap all, or none."""
    from ddtree_overlay import fleet_reports, members

    if canary and not restart:
        raise UsageError(
            "--canary waits until the first hosts have proven themselves, and they cannot without a restart",
            next_step="add --restart, or leave --canary out",
        )
    _require_restart(fleet, restart=restart)
    stored, crew = bundles(app, fleet), crew_of(app, parallel)
    with connections(app, fleet) as reach:
        found, errors = _looked(
            app, fleet, crew, lambda t, say: members.look_ahead(reach(t), stored, say, restart=restart)
        )
        rows = {name: fleet_reports.push_row(p.status, p.plan) for name, p in found.items()}
        plans = {name: p.plan.as_dict() for name, p in found.items()}
        current = frozenset(name for name, p in found.items() if p.is_current)
        proposal = Proposal(app, fleet, "push", rows, errors, plans, current, restart=restart)
        proposal.show({name: fleet_reports.remarks_on(p.plan, restart=restart) for name, p in found.items()})
        options = f" --canary {canary}" if canary else ""
        if (code := proposal.settled("Push to", yes=yes, dry_run=dry_run, options=options)) is not None:
            return code
        stage = secrets.token_hex(8)
        team = [
            members.PushMember(reach(t), found[t.name], stage=stage, operator=operator(), lock_wait=lock_wait)
            for t in fleet.targets
            if restart or t.name not in current
        ]
        return _push_team(proposal, crew, team, canaries=canary or 0, proving=restart)


def _looked(
    app: App, fleet: Fleet, crew: Crew, look: Callable[[Target, Say], P]
) -> tuple[dict[str, P], dict[str, OverlayError]]:
    """What every host looks like and what would be done there, or why it cannot be; nothing is written.

    Raises:
        UsageError: Two names lead to the same package.
    """
    from ddtree_overlay.members import refuse_twins

    app.screen.note(f"{fleet.label}: planning on {counted(len(fleet.targets), 'host')}")
    found, errors = divided(fleet, crew.each(fleet.targets, look))
    refuse_twins((name, plan.place) for name, plan in found.items())
    return found, errors


def _push_team(proposal: Proposal, crew: Crew, team: Sequence[PushMember], *, canaries: int, proving: bool) -> int:
    from ddtree_overlay.fleet import exit_code, roll_out

    with crew.minding_interrupts():
        outcomes = [_without_change(o, proposal) for o in roll_out(team, crew, canaries=canaries, proving=proving)]
    stands = {o.host for o in outcomes if o.fate == "changed"}
    details: dict[str, dict[str, Any]] = {}
    labels = {}
    for member in team:
        done = member.deployment if member.name in stands else None
        proof = member.proof.as_dict() if member.proof else None
        details[member.name] = {"deployment": done.as_dict() if done else None, "proof": proof}
        labels[member.name] = f"{done.id} ({done.state})" if done else ""
    code = exit_code(outcomes, interrupted=crew.interrupted)
    return proposal.close(outcomes, code, done="pushed to", details=details, labels=labels)


def _without_change(outcome: Outcome, proposal: Proposal) -> Outcome:
    """A host that had the overlay already was only asked to prove it: nothing was changed there, or put back."""
    if outcome.host not in proposal.current or outcome.fate == "untouched":
        return outcome
    return replace(outcome, fate="refused" if outcome.error else "current")


def _require_restart(fleet: Fleet, *, restart: bool) -> None:
    """Refuse `--restart` if deploy.toml does not say of every host how, before one of them is connected to."""
    for target in fleet.targets if restart else ():
        require_restart(target)


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
    restart: bool,
) -> int:
    """Plan on all hosts, one table, one question; then roll back all of them."""
    refuse_purge(to, purge=purge, restart=restart)
    _require_restart(fleet, restart=restart)
    from ddtree_overlay import fleet_reports, members
    from ddtree_overlay.fleet import exit_code, fates

    crew = crew_of(app, parallel)
    with connections(app, fleet) as reach:
        found, errors = _looked(
            app, fleet, crew, lambda t, say: members.look_back(reach(t), to=to, purge=purge, say=say, restart=restart)
        )
        rows = {name: fleet_reports.rollback_row(r.status, r.plan, r.goal) for name, r in found.items()}
        plans = {name: r.plan.as_dict() for name, r in found.items()}
        current = frozenset(name for name, r in found.items() if r.is_current)
        proposal = Proposal(app, fleet, "rollback", rows, errors, plans, current, restart=restart)
        proposal.show({name: fleet_reports.remarks_on(r.plan, restart=restart) for name, r in found.items()})
        options = (f" --to {to}" if to else "") + (" --purge" if purge else "")
        if (code := proposal.settled("Roll back", yes=yes, dry_run=dry_run, options=options)) is not None:
            return code
        todo = [t for t in fleet.targets if t.name not in current]
        with crew.minding_interrupts():
            results = crew.each(
                todo,
                lambda t, say: members.roll_back(
                    reach(t), found[t.name], operator=operator(), lock_wait=lock_wait, restart=restart, say=say
                ),
            )
        outcomes = fates(todo, results)
        return proposal.close(outcomes, exit_code(outcomes, interrupted=crew.interrupted), done="rolled back")


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
