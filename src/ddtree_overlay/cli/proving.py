# SPDX-License-Identifier: Apache-2.0
"""`confirm`, and what `push --restart` and `rollback --restart` say: restarts whose result is proven."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ddtree_overlay.cli.options import INSTALLED, App, Seconds, verb
from ddtree_overlay.cli.selecting import Target
from ddtree_overlay.cli.targets import opened, operator
from ddtree_overlay.config_keys import MAX_TIMEOUT
from ddtree_overlay.reports import Line, row


if TYPE_CHECKING:
    from ddtree_overlay.hosts.transport import Transport
    from ddtree_overlay.proving import Progress, Proof

_Command = TypeVar("_Command", bound=Callable[..., Any])


def restart_option(text: str) -> Callable[[_Command], _Command]:
    """The option `--restart`."""
    return click.option("--restart", is_flag=True, help=text)


def require_restart(target: Target) -> None:
    """Refuse `--restart` for a host that deploy.toml knows no way to restart, before it is connected to.

    Raises:
        ConfigError: `restart` or `health` is missing.
    """
    from ddtree_overlay.proving import trial_of

    trial_of(target.place)


def rehearse(app: App, target: Target, transport: Transport) -> None:
    """What a dry run can find out about a restart: whether it could be run and checked, and what serves now.

    Raises:
        OverlayError: It could not.
    """
    from ddtree_overlay import proving

    app.screen.note(f"{target.name}: the server can be restarted and asked; now: {proving.check(transport)}")


def teller(app: App, target: Target) -> Progress:
    """Shows what the host says while it restarts."""
    return lambda text: app.screen.note(f"{target.name}: {text}")


def proof_line(target: Target, proof: Proof) -> Line:
    """The closing line of a restart."""
    waited = f", after {proof.waited:.0f} s" if proof.waited else ""
    return row((f"{target.name}: live", "ok"), f": {proof.why}{waited}")


@verb(targets=INSTALLED, example="ddtree-overlay confirm --host ct200 --note by-nightly-job")
@click.option("--note", default="", metavar="TEXT", help="Why you know; kept in the history.")
@click.option(
    "--lock-wait",
    type=Seconds(min=0, max=MAX_TIMEOUT),
    default=0.0,
    metavar="SECONDS",
    help="Wait this long for the host.",
)
def confirm(app: App, target: Target, *, note: str, lock_wait: float) -> int:
    """Say that the deployment on a host serves well.

    For who restarts by other means than push --restart. It is then good: kept by pruning, and a place to roll back
    to. With `health` in deploy.toml the live server is asked, and what it denies is not confirmed.
    """
    from ddtree_overlay import proving

    with opened(app, target) as transport:
        confirmed = proving.confirm(transport, operator=operator(), note=note, lock_wait=lock_wait)
    done, before = confirmed.deployment, confirmed.before
    if confirmed.said and not confirmed.checked:
        app.screen.warn(
            f"{target.name}: the live server could not be asked, so this is your word alone: {confirmed.said}"
        )
    text = "was good already" if before else "is good now"
    heard = f"; the live server: {confirmed.said}" if confirmed.checked else ""
    lines = [row((f"{target.name}: {done.id} {text}", "ok"), f", overlay {done.overlay_id}{heard}")]
    value = {
        "changed": not before,
        "deployment": done.as_dict(),
        "said": confirmed.said,
        "checked": confirmed.checked,
    }
    return app.finish("confirm", value, lines)
