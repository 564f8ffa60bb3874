# SPDX-License-Identifier: Apache-2.0
"""Push, rollback, status and history, as the operator sees them. The work is done by the agent on the host."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddtree_overlay.answers import push_plan_of, rollback_plan_of, rollback_result, status_of
from ddtree_overlay.errors import ConflictError, OverlayError, UsageError
from ddtree_overlay.hosts.transport import Transport
from ddtree_overlay.manifest import Bundle, sha256
from ddtree_overlay.plans import (
    Deployment,
    PushPlan,
    RollbackPlan,
    RollbackResult,
    Status,
)


if TYPE_CHECKING:
    from ddtree_overlay.workspace import StoredBundle


def plan_push(transport: Transport, bundle: Bundle, files: Mapping[str, bytes]) -> PushPlan:
    """What a push of `bundle` would do on the host now. Nothing is written there."""
    rows = [{**row, "size": len(files[row["path"]])} for row in bundle.rows()]
    return push_plan_of(
        transport, bundle, transport.call("plan_push", {"candidates": [rows], "releases": [bundle.release]}).result
    )


def plan_push_of(transport: Transport, stored: Sequence[StoredBundle]) -> tuple[PushPlan, StoredBundle]:
    """The plan of the bundle that belongs to the files on the host, chosen there by their digests, and that bundle.

    Of several for the same base the first is taken; when none fits, the first for the host's release, or of all, and
    its plan has conflicts.
    """
    offered = {"candidates": [s.rows() for s in stored], "releases": [s.bundle.release for s in stored]}
    result = transport.call("plan_push", offered).result
    chosen = stored[result["chosen"]]
    return push_plan_of(transport, chosen.bundle, result), chosen


def push(
    transport: Transport,
    plan: PushPlan,
    files: Mapping[str, bytes],
    *,
    operator: str,
    lock_wait: float = 0,
    stage: str = "",
    progress: Callable[[str], None] | None = None,
) -> Deployment:
    """Carry out exactly `plan`; the host checks every digest again under its lock.

    With `stage` the bytes are on the host already, in the stage of this name. `progress` is told whom it waits for.

    Returns:
        The deployment that is live afterwards. A plan that is a no-op writes nothing.

    Raises:
        ConflictError: The plan has conflicts, or a file has changed since it was made; nothing was written.
        LockedError: Another push or rollback is running, and still was after `lock_wait` seconds.
        RolledBackError: It failed half-way and everything was put back.
        RollbackIncompleteError: It failed half-way, and not everything could be put back.
        OverlayError: The host cannot be written to, or has this overlay from another source; nothing was written.
    """
    plan.check()
    if not plan.is_noop or plan.unfinished:
        args, payload = push_request(plan, files, operator=operator, lock_wait=lock_wait)
        if stage:
            args, payload = {**args, "stage": stage}, b""
        result = transport.call("push", args, payload, progress=progress).result
        tell_recovered(transport, result)
        done = result["deployment"]
        if done is not None:
            return Deployment.from_json(done)
    live = next((d for d in history(transport) if d.current), None)
    if live is None:
        raise nobodys(transport.name)
    return live


def push_request(
    plan: PushPlan, files: Mapping[str, bytes], *, operator: str, lock_wait: float
) -> tuple[dict[str, Any], bytes]:
    """What the host is told, and the bytes that go with it, so that it carries out exactly `plan`."""
    overlay = [a for a in plan.actions if a.path in files]
    changes = [
        {"path": a.path, "base": a.base_sha256, "after": sha256(files[a.path]), "size": len(files[a.path])}
        for a in overlay
    ]
    args = {
        "changes": changes,
        "expect": [[a.path, a.live_sha256, a.sha256] for a in plan.actions],
        "operator": operator,
        "lock_wait": lock_wait,
        "overlay_id": plan.overlay_id,
        "base_id": plan.base_id,
        "release": plan.release,
    }
    return args, b"".join(files[a.path] for a in overlay)


def nobodys(name: str) -> OverlayError:
    """The error of an overlay that is in place although no deployment put it there."""
    return OverlayError(
        f"{name}: the overlay is in place, but no deployment put it there",
        next_step="reinstall SGLang on the host to get rid of it",
    )


def plan_rollback(transport: Transport, *, to: str | None = None, purge: bool = False) -> RollbackPlan:
    """What a rollback would do on the host now. Nothing is written there.

    Args:
        transport: The host.
        to: Id of the deployment to go back to, or "base" for none at all. None: one deployment back, or with `purge`
            all the way.
        purge: Also remove the state folder, when going back to the base.

    Raises:
        UsageError: `to` cannot be the id of a deployment.
    """
    if to is not None and to != "base" and not re.fullmatch("d-[0-9]{1,9}", to):
        raise UsageError(
            f"{to!r} is no deployment: these are called d-0001, d-0002 and so on, and base is before all of them",
            next_step=f"ddtree-overlay history {transport.target}",
        )
    result = transport.call("plan_rollback", {"to": to, "purge": purge}).result
    return rollback_plan_of(transport, result, purge=purge)


def rollback(
    transport: Transport,
    *,
    to: str | None = None,
    purge: bool = False,
    operator: str = "",
    plan: RollbackPlan | None = None,
    lock_wait: float = 0,
    progress: Callable[[str], None] | None = None,
) -> RollbackResult:
    """Go back to the exact bytes, modes and absence of files of an earlier state, and check that this worked.

    With `plan`, exactly that plan is carried out and `to` and `purge` come from it. Raises as `push`.
    """
    plan = plan or plan_rollback(transport, to=to, purge=purge)
    plan.check()
    if plan.is_noop and not plan.unfinished:
        return RollbackResult(transport.name, (), plan.to, 0, 0, 0, purged=False, verified=0)
    args = rollback_request(plan, operator=operator, lock_wait=lock_wait)
    result = transport.call("rollback", args, progress=progress).result
    tell_recovered(transport, result)
    return rollback_result(transport.name, result)


def rollback_request(plan: RollbackPlan, *, operator: str, lock_wait: float) -> dict[str, Any]:
    """Arguments of the agent's `rollback` that carries out exactly `plan`."""
    return {
        "to": plan.to,
        "purge": plan.purge,
        "expect": [[a.path, a.live_sha256, a.sha256] for a in plan.actions],
        "operator": operator,
        "lock_wait": lock_wait,
    }


def tell_recovered(transport: Transport, result: Mapping[str, Any]) -> None:
    """What was put right before the operation itself is said with whatever else was noticed on the way."""
    if result["recovered"]:
        transport.warnings.append(result["recovered"])


def status(transport: Transport) -> Status:
    """What is deployed on the host, and whether it is still as it was pushed."""
    return status_of(transport, transport.call("status", {}).result)


def history(transport: Transport) -> list[Deployment]:
    """Every deployment on the host, the oldest first."""
    return [Deployment.from_json(d) for d in transport.call("history", {}).result["deployments"]]


def fetch_files(transport: Transport, paths: Collection[str]) -> dict[str, bytes | None]:
    """Contents of each of `paths` on the host now; None where there is no such file.

    Raises:
        ConflictError: A file did not arrive as it is.
    """
    reply = transport.call("fetch", {"paths": sorted(paths)})
    files: dict[str, bytes | None] = {}
    at = 0
    for item in reply.result["files"]:
        if item["size"] is None:
            files[item["path"]] = None
            continue
        data = reply.payload[at : at + item["size"]]
        at += item["size"]
        if sha256(data) != item["sha256"]:
            raise ConflictError(f"{item['path']} did not arrive as it is on {transport.name}")
        files[item["path"]] = data
    return files
