# SPDX-License-Identifier: Apache-2.0
"""Restart a host's server and find out whether it runs what is on the disk. The work is done by the agent there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ddtree_overlay.config import Host
from ddtree_overlay.hosts.transport import Transport
from ddtree_overlay.plans import Deployment


Verdict = Literal["live", "unrestarted", "restart-failed", "other", "unhealthy"]
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Proof:
    """What became of a server that was waited for.

    Args:
        ok: The server answers, reports what it should report, and generates.
        verdict: `live` (ok), `unrestarted` (the old code still serves: nothing was restarted), `restart-failed` (the
            restart command failed or hung), `other` (a new server that reports something else), `unhealthy` (none that
            answers as it should).
        why: One sentence for the operator.
        waited: Seconds from the restart to the verdict.
        answers: What the server answered meanwhile, each different answer once, in order.
        restarted: Whether anything was restarted or stopped: then a rollback of the files needs a restart as well.
    """

    ok: bool
    verdict: Verdict
    why: str
    waited: float
    answers: tuple[str, ...]
    restarted: bool

    def as_dict(self) -> dict[str, Any]:
        """The value as `--json` prints it."""
        return asdict(self)


def trial_of(host: Host) -> dict[str, Any]:
    """How `host` is restarted and asked, as the agent is told.

    Raises:
        ConfigError: `restart` (or `restart_unit`) or `[hosts.NAME.health] url` is missing from deploy.toml.
    """
    raise NotImplementedError


def prove(transport: Transport, deployment: Deployment | None, *, restart: bool, progress: Progress) -> Proof:
    """Restart the host's server if `restart`, and wait until it reports `deployment` (None: no overlay at all).

    The state of the deployment stays as it is: see `settle`. Nothing else may change the host meanwhile, for the agent
    holds the host's lock. An answer of "no" is a value, not an exception.

    Args:
        transport: The host.
        deployment: What is live there; after a rollback, what was gone back to.
        restart: Restart first; else only ask.
        progress: Told what is waited for, with the elapsed seconds.

    Raises:
        ConfigError: The host has no `restart` or no `health`.
        ConflictError: Something else than `deployment` is live on the host.
        LockedError: Another operation is running there.
    """
    raise NotImplementedError


def settle(transport: Transport, deployment: Deployment, proof: Proof, *, operator: str) -> Deployment:
    """Record in the host's history what `proof` says of `deployment`, and give back its summary.

    `good` after a proof; `bad` if new code had its chance and failed; `pending` as before if nothing was restarted.
    """
    raise NotImplementedError
