# SPDX-License-Identifier: Apache-2.0
"""`push` and `rollback`: the two verbs that change a host. Both show their plan, ask, and run exactly that plan."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import click

from ddtree_overlay.cli.fleets import CANARY, PARALLEL, push_to_fleet, refuse_purge, rollback_of_fleet
from ddtree_overlay.cli.options import INSTALLED, App, CancelledError, Seconds, verb
from ddtree_overlay.cli.proving import proof_line, rehearse, require_restart, restart_option, teller
from ddtree_overlay.cli.selecting import Target
from ddtree_overlay.cli.targets import bundles, opened, operator
from ddtree_overlay.config_keys import MAX_TIMEOUT
from ddtree_overlay.reports import Line, deployed_line, plan_lines, rollback_plan_lines, rolled_back_line, row


if TYPE_CHECKING:
    from ddtree_overlay.hosts.transport import Transport
    from ddtree_overlay.plans import PushPlan, RollbackPlan


_YES = click.option("--yes", "-y", is_flag=True, help="Do not ask.")
_DRY_RUN = click.option("--dry-run", is_flag=True, help="Print the plan and stop.")
_LOCK_WAIT = click.option(
    "--lock-wait",
    type=Seconds(min=0, max=MAX_TIMEOUT),
    default=0.0,
    metavar="SECONDS",
    help="Wait this long for another deployment on the host.",
)


@verb(
    targets=INSTALLED,
    example="ddtree-overlay push --host ct200 --dry-run\n  ddtree-overlay push --host ct200 --restart\n"
    "  ddtree-overlay push --group gpu",
    fleet=push_to_fleet,
    fleet_options=(PARALLEL, CANARY),
)
@restart_option("Restart the server and prove that it runs this; go back if it does not.")
@_YES
@_DRY_RUN
@_LOCK_WAIT
def push(app: App, target: Target, *, restart: bool, yes: bool, dry_run: bool, lock_wait: float) -> int:
    """Put the overlay on a host.

    Plan, question, backup, replace, verify. The bundle is chosen by the digests of the installed files. What
    runs is exactly the plan that is shown; a file that changes in between stops it. An overlay that is already
    there is up to date: nothing is written.

    With --restart the host restarts its server and waits until that reports this overlay and generates. If it does
    not, the host puts the files back, restarts once more, and checks what it has gone back to: exit 6, or 7 if that
    does not serve either. All of it goes on without you if the connection is lost.

    Several hosts change together or not at all: each is planned, staged and checked before the first one is swapped,
    and when one fails, all that were swapped are put back. With --canary the first ones are proven before the others.
    """
    from ddtree_overlay import deploy

    if restart:
        require_restart(target)
    with opened(app, target) as transport:
        plan, stored = deploy.plan_push_of(transport, bundles(app, target))
        files = stored.files()
        rest = f", overlay {plan.overlay_id} is already there; nothing was written"
        settled = row((f"{target.name}: up to date", "ok"), rest)
        if restart and dry_run:
            rehearse(app, target, transport)
        if _settled(app, "push", plan, plan_lines(plan), settled, dry_run=dry_run, restart=restart):
            return 0
        question, option = (" and restart its server", " --restart") if restart else ("", "")
        again = f"{target.command('push')}{option} --yes"
        if not yes and not app.screen.confirm(f"Push to {target.name}{question}?", next_step=again):
            return _declined(app, "push")
        if not plan.is_noop:
            app.screen.note(f"{target.name}: backing up, replacing and verifying")
        with _cancelled_half_way(target):
            if restart:
                return _push_and_prove(app, target, transport, plan, files, lock_wait=lock_wait)
            tell = teller(app, target)
            done = deploy.push(transport, plan, files, operator=operator(), lock_wait=lock_wait, progress=tell)
    value = {"changed": True, "plan": plan.as_dict(), "deployment": done.as_dict() if done else None}
    return app.finish("push", value, [deployed_line(plan, done)])


def _push_and_prove(
    app: App, target: Target, transport: Transport, plan: PushPlan, files: Mapping[str, bytes], *, lock_wait: float
) -> int:
    from ddtree_overlay import proving

    tell = teller(app, target)
    done, proof = proving.push(transport, plan, files, operator=operator(), progress=tell, lock_wait=lock_wait)
    changed = not plan.is_noop or proof.restarted
    value = {"changed": changed, "plan": plan.as_dict(), "deployment": done.as_dict(), "proof": proof.as_dict()}
    pushed = [] if plan.is_noop else [deployed_line(plan, done)]
    return app.finish("push", value, [*pushed, proof_line(target, proof)])


@verb(
    targets=INSTALLED,
    example="ddtree-overlay rollback --host ct200\n  ddtree-overlay rollback --host ct200 --to base --purge\n"
    "  ddtree-overlay rollback --group gpu",
    fleet=rollback_of_fleet,
    fleet_options=(PARALLEL,),
)
@click.option("--to", metavar="ID", help="Go back to this deployment, or to `base`. Default: one deployment back.")
@click.option("--purge", is_flag=True, help="Go back to the base and remove backups and history as well.")
@restart_option("Restart the server and prove that it serves again.")
@_YES
@_DRY_RUN
@_LOCK_WAIT
def rollback(
    app: App,
    target: Target,
    *,
    to: str | None,
    purge: bool,
    restart: bool,
    yes: bool,
    dry_run: bool,
    lock_wait: float,
) -> int:
    """Give a host its earlier files back.

    Bytes, modes, and the absence of what was added; then they are checked. With --purge not one byte of the
    overlay stays behind, its folder beside the package included.
    """
    from ddtree_overlay import deploy

    refuse_purge(to, purge=purge, restart=restart)
    if restart:
        require_restart(target)
    with opened(app, target) as transport:
        plan = deploy.plan_rollback(transport, to=to, purge=purge)
        settled = row((f"{target.name}: nothing to roll back", "ok"))
        if restart and dry_run:
            rehearse(app, target, transport)
        if _settled(app, "rollback", plan, rollback_plan_lines(plan), settled, dry_run=dry_run):
            return 0
        options = [f"--to {to}" if to else "", "--purge" if purge else "", "--restart" if restart else "", "--yes"]
        again = " ".join([target.command("rollback"), *filter(None, options)])
        if not yes and not app.screen.confirm(f"Roll back {target.name}?", next_step=again):
            return _declined(app, "rollback")
        app.screen.note(f"{target.name}: restoring and verifying")
        with _cancelled_half_way(target):
            if restart:
                return _rollback_and_prove(app, target, transport, plan, lock_wait=lock_wait)
            tell = teller(app, target)
            done = deploy.rollback(transport, plan=plan, operator=operator(), lock_wait=lock_wait, progress=tell)
    value = {"changed": True, "plan": plan.as_dict(), "result": done.as_dict()}
    return app.finish("rollback", value, [rolled_back_line(done)])


def _rollback_and_prove(app: App, target: Target, transport: Transport, plan: RollbackPlan, *, lock_wait: float) -> int:
    from ddtree_overlay import proving

    tell = teller(app, target)
    done, proof = proving.rollback(transport, plan, operator=operator(), progress=tell, lock_wait=lock_wait)
    value = {"changed": True, "plan": plan.as_dict(), "result": done.as_dict(), "proof": proof.as_dict()}
    return app.finish("rollback", value, [rolled_back_line(done), proof_line(target, proof)])


def _settled(
    app: App,
    command: str,
    plan: PushPlan | RollbackPlan,
    lines: list[Line],
    settled: Line,
    *,
    dry_run: bool,
    restart: bool = False,
) -> bool:
    """Show the plan; True when there is nothing more to do. Raises what stands in the plan's way."""
    value = {"changed": False, "dry_run": dry_run, "plan": plan.as_dict()}
    if plan.is_noop and not plan.unfinished and not restart:
        plan.check()
        for text in plan.warnings:
            app.screen.warn(f"{plan.host}: {text}")
        app.finish(command, value, [settled])
        return True
    app.screen.ask_lines(lines)
    plan.check()
    if dry_run:
        app.finish(command, value, [row(("Dry run: nothing was written.", "dim"))])
    return dry_run


@contextlib.contextmanager
def _cancelled_half_way(target: Target) -> Iterator[None]:
    """Say where to look when Ctrl-C ends the command, but perhaps not what it has started on the host."""
    try:
        yield
    except KeyboardInterrupt:
        raise CancelledError(
            f"interrupted while {target.name} was being changed",
            why="the host may go on to finish the change, or undo it, on its own",
            next_step=target.command("status"),
        ) from None


def _declined(app: App, command: str) -> int:
    app.screen.note("nothing was changed")
    return app.finish(command, {"changed": False, "declined": True}, [], code=1)
