# SPDX-License-Identifier: Apache-2.0
"""Restart a host's server and find out whether it runs what is on the disk. The work is done by the agent there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from ddtree_overlay import answers, deploy
from ddtree_overlay.config import Host
from ddtree_overlay.errors import ConfigError, OverlayError, UsageError
from ddtree_overlay.hosts.transport import TOTAL_SECONDS, Transport
from ddtree_overlay.plans import Deployment, PushPlan, RollbackPlan, RollbackResult


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

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Proof:
        """The proof as the agent describes it."""
        return cls(**{**raw, "answers": tuple(raw["answers"])})


def trial_of(host: Host) -> dict[str, Any]:
    """How `host` is restarted and asked, as the agent is told.

    Raises:
        ConfigError: `restart` (or `restart_unit`) or `[hosts.NAME.health] url` is missing from deploy.toml.
    """
    if host.root:
        raise UsageError(
            "--root has nothing to restart: only a host of deploy.toml says how",
            next_step="name a host with --host NAME",
        )
    if not host.restart and not host.restart_unit:
        raise ConfigError(
            f"{host.name} cannot be restarted: deploy.toml does not say how",
            why="nothing was changed",
            next_step=f'write restart_unit = "sglang.service" or restart = "COMMAND" into [hosts.{host.name}]',
        )
    if host.health is None:
        raise ConfigError(
            f"a restart of {host.name} could not be checked: deploy.toml does not say where its server listens",
            why="nothing was changed; a restart that nobody checks cannot be undone when it fails",
            next_step=f'write url = "http://127.0.0.1:30000" into [hosts.{host.name}.health]',
        )
    return {
        "restart": list(host.restart),
        "unit": host.restart_unit,
        "restart_timeout": host.restart_timeout,
        "url": host.health.url,
        "timeout": host.health.timeout,
        "api_key_file": host.health.api_key_file,
    }


def check(transport: Transport) -> str:
    """See that the host's restart command is there and that its server can be asked; gives what that says now.

    Raises:
        ConfigError: As `trial_of`.
        OverlayError: The program is missing, or what answers is no server of SGLang or wants a key.
    """
    found: str = transport.call("rehearse", {"trial": trial_of(transport.host)}).result["heard"]
    return found


def push(
    transport: Transport,
    plan: PushPlan,
    files: Mapping[str, bytes],
    *,
    operator: str,
    progress: Progress,
    lock_wait: float = 0,
) -> tuple[Deployment, Proof]:
    """As `deploy.push`, then restart and prove, and go back when that fails: all of it one operation on the host.

    With a plan that is a no-op, the server is restarted unless it runs this overlay already.

    Raises:
        ConfigError: As `trial_of`.
        RolledBackError: The server did not come up with the overlay; the old state is back and serves.
        RollbackIncompleteError: It did not come up with the old state either, or the files could not be put back.
        OverlayError: As `deploy.push`.
    """
    trial = trial_of(transport.host)
    plan.check()
    args, payload = deploy.push_request(plan, files, operator=operator, lock_wait=lock_wait)
    total = _total(trial)
    result = transport.call("push", {**args, "trial": trial}, payload, total=total, progress=progress).result
    deploy.tell_recovered(transport, result)
    if result["deployment"] is None:
        raise deploy.nobodys(transport.name)
    return Deployment.from_json(result["deployment"]), Proof.from_json(result["proof"])


def rollback(
    transport: Transport, plan: RollbackPlan, *, operator: str, progress: Progress, lock_wait: float = 0
) -> tuple[RollbackResult, Proof]:
    """As `deploy.rollback`, then restart and prove. Nothing is undone when that fails.

    Raises:
        ConfigError: As `trial_of`.
        RollbackIncompleteError: The files are back, but the server does not come up or was not restarted.
        OverlayError: As `deploy.rollback`.
    """
    trial = trial_of(transport.host)
    plan.check()
    args = deploy.rollback_request(plan, operator=operator, lock_wait=lock_wait)
    total = _total(trial)
    result = transport.call("rollback", {**args, "trial": trial}, total=total, progress=progress).result
    deploy.tell_recovered(transport, result)
    return answers.rollback_result(transport.name, result), Proof.from_json(result["proof"])


def prove(
    transport: Transport, deployment: Deployment | None, *, restart: bool, progress: Progress, operator: str = ""
) -> Proof:
    """Restart the host's server if `restart`, and wait until it reports `deployment` (None: no overlay at all).

    The state of the deployment stays as it is: see `settle`. Nothing else may change the host meanwhile, for the agent
    holds the host's lock. An answer of "no" is a value, not an exception.

    Args:
        transport: The host.
        deployment: What is live there; after a rollback, what was gone back to.
        restart: Restart first; else only ask.
        progress: Told what is waited for, with the elapsed seconds.
        operator: Who asks, for whoever finds the host locked meanwhile.

    Raises:
        ConfigError: The host has no `restart` or no `health`.
        ConflictError: Something else than `deployment` is live on the host.
        LockedError: Another operation is running there.
    """
    trial = trial_of(transport.host)
    name = deployment.id if deployment else None
    args = {"trial": trial, "deployment": name, "restart": restart, "operator": operator, "lock_wait": 0}
    return Proof.from_json(transport.call("prove", args, total=_total(trial), progress=progress).result["proof"])


def settle(transport: Transport, deployment: Deployment, proof: Proof, *, operator: str) -> Deployment:
    """Record in the host's history what `proof` says of `deployment`, and give back its summary.

    `good` after a proof; `bad` if new code had its chance and failed; `pending` as before if nothing was restarted.
    """
    if proof.ok or proof.restarted:
        state = "good" if proof.ok else "bad"
        args = {"id": deployment.id, "state": state, "note": proof.why, "operator": operator, "lock_wait": 10}
        transport.call("settle", args)
    return next((d for d in deploy.history(transport) if d.id == deployment.id), deployment)


class Confirmed(NamedTuple):
    """What `confirm` did: the deployment, and whether it was good before.

    `said` is what the live server answered, or why it did not, "" when there is no way to ask it; `checked` is whether
    it said that it runs this overlay.
    """

    deployment: Deployment
    before: bool
    said: str
    checked: bool


def confirm(transport: Transport, *, operator: str, note: str = "", lock_wait: float = 0) -> Confirmed:
    """Take the operator's word that the live deployment serves well.

    Where `health` is configured, the live server is asked; one that reports something else is not confirmed.

    Raises:
        ConflictError: Its files are not all in place.
        OverlayError: Nothing is deployed, or the live server runs something else.
    """
    health = transport.host.health
    trial = {"url": health.url, "api_key_file": health.api_key_file} if health else None
    args = {"trial": trial, "operator": operator, "note": note or "confirmed by hand", "lock_wait": lock_wait}
    try:
        result = transport.call("confirm", args).result
    except OverlayError as e:
        # The agent does not know what its host is called on this machine.
        e.what = e.what if transport.name in e.what else f"{transport.name}: {e.what}"
        raise
    found = next(d for d in deploy.history(transport) if d.id == result["id"])
    return Confirmed(found, result["before"] == "good", result["said"], result["checked"])


def _total(trial: Mapping[str, Any]) -> float:
    """The longest that a push with everything that may follow it can take: two restarts, two waits, and the rest."""
    return float(2 * (trial["restart_timeout"] + trial["timeout"]) + TOTAL_SECONDS)
