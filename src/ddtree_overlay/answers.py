# SPDX-License-Identifier: Apache-2.0
"""What the agent's answers say: plans, results and the status of a host, as the operator's side knows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ddtree_overlay.hosts.transport import Transport
from ddtree_overlay.manifest import Bundle
from ddtree_overlay.plans import (
    Deployment,
    FileAction,
    FileStatus,
    Problem,
    Process,
    PushPlan,
    RollbackPlan,
    RollbackResult,
    Status,
)
from ddtree_overlay.releases import RELEASES, is_supported
from ddtree_overlay.remote import remarks
from ddtree_overlay.remote.planning import BASE_GONE
from ddtree_overlay.reports import listed


def push_plan_of(transport: Transport, bundle: Bundle, result: Mapping[str, Any]) -> PushPlan:
    """The plan of a push of `bundle` in an answer of the host."""
    lines = {c.path: (c.added, c.removed) for c in bundle.changes}
    return PushPlan(
        host=transport.name,
        target=transport.target,
        root=result["root"],
        install=result["install"],
        version=result["versions"]["sglang"] or "unknown",
        python=result["versions"]["python"] or "",
        executable=(result["interpreter"] or {}).get("executable", ""),
        overlay_id=bundle.overlay_id,
        base_id=bundle.base_id,
        release=bundle.release,
        deployment=result["deployment"],
        actions=tuple(_action(a, lines) for a in result["actions"]),
        blockers=_unless_supported(_problems(result["blockers"], transport.target), result, transport.target),
        warnings=tuple(remarks.on_push(result, bundle.release, fate(transport.target))),
        processes=_processes(result["processes"]),
        unfinished=result["unfinished"],
    )


def rollback_plan_of(transport: Transport, result: Mapping[str, Any], *, purge: bool) -> RollbackPlan:
    """The plan of a rollback in an answer of the host."""
    warnings = tuple(remarks.on_host(result, "the overlay is lost when the container is recreated"))
    if result["left"]:
        names = listed(result["left"], 3)
        warnings += (f"{result['reason']}; these files are not ours any more: {names}",)
    if result["lost"]:
        warnings += (f"the history on the host is damaged; this goes by the record of {result['current']}",)
    return RollbackPlan(
        host=transport.name,
        target=transport.target,
        root=result["root"],
        current=result["current"],
        to=result["to"],
        undoes=tuple(result["undoes"]),
        actions=tuple(_action(a, {}) for a in result["actions"]),
        blockers=_problems(result["blockers"], transport.target),
        warnings=warnings,
        processes=_processes(result["processes"]),
        purge=purge and result["to"] == "base" and result["state_folder"],
        unfinished=result["unfinished"],
    )


def rollback_result(name: str, result: Mapping[str, Any]) -> RollbackResult:
    """What the agent's `rollback` on the host `name` did."""
    return RollbackResult(
        host=name,
        undone=tuple(result["undone"]),
        to=result["to"],
        restored=result["restored"],
        removed=result["removed"],
        directories=result["folders"],
        purged=result["purged"],
        verified=result["verified"],
        recovered=result["recovered"],
    )


def status_of(transport: Transport, result: Mapping[str, Any]) -> Status:
    """The status in an answer of the host."""
    live = Deployment.from_json(result["deployment"]) if result["deployment"] else None
    version = result["versions"]["sglang"]
    return Status(
        host=transport.name,
        target=transport.target,
        root=result["root"],
        install=result["install"],
        version=version or "unknown",
        state=result["state"],
        reason=result["reason"],
        deployment=live,
        # What was installed over an overlay, or took it away, serves without one.
        overlay_id=live.overlay_id if live and result["state"] not in BASE_GONE else None,
        files=tuple(FileStatus(**f) for f in result["files"]),
        processes=_processes(result["processes"]),
        unfinished=result["unfinished"],
        ephemeral=result["container"]["ephemeral"],
        warnings=tuple(remarks.on_host(result, fate(transport.target))),
        remedy=result["remedy"].replace("{target}", transport.target),
        supported=is_supported(version),
        restartable=transport.host.restartable,
    )


def fate(target: str) -> str:
    """What becomes of an overlay in a container, and what keeps it."""
    keep = f"ddtree-overlay export {target} --format dockerfile --out FOLDER"
    return f"the overlay is lost when the container is recreated; build it into the image: {keep}"


def _action(raw: Mapping[str, Any], lines: Mapping[str, tuple[int, int]]) -> FileAction:
    added, removed = lines.get(raw["path"], (0, 0))
    return FileAction(
        path=raw["path"],
        action=raw["action"],
        live_sha256=raw["from"],
        sha256=raw["to"],
        base_sha256=raw.get("base"),
        added=added,
        removed=removed,
        mode=raw["mode"],
        owner=raw["owner"] or "",
        nlink=raw["nlink"] or 0,
        reason=raw["reason"],
    )


def _problems(raw: Sequence[Mapping[str, str]], target: str) -> tuple[Problem, ...]:
    return tuple(Problem(r["kind"], r["what"], r["why"], r["next"].replace("{target}", target)) for r in raw)


def _unless_supported(found: tuple[Problem, ...], result: Mapping[str, Any], target: str) -> tuple[Problem, ...]:
    """The problems of a plan, with a next step that can be gone: for an unknown release no overlay can be built."""
    if result["state"] != "upgraded" or is_supported(result["versions"]["sglang"]):
        return found
    way = f"pip install sglang=={RELEASES[-1].version}  # on the host\nddtree-overlay status {target}"
    return tuple(replace(p, next_step=way) if p.kind == "conflict" else p for p in found)


def _processes(raw: Sequence[Mapping[str, Any]]) -> tuple[Process, ...]:
    """For a plan every process is from before."""
    return tuple(Process(p["pid"], p["command"], p["started"], stale=p.get("stale", True)) for p in raw)
