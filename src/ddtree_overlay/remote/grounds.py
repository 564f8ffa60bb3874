# SPDX-License-Identifier: Apache-2.0
"""What push and rollback share: the view of the host that a plan is made from, and the check that it still holds."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any, Callable, TypeVar, cast

from . import planning
from .common import Refusal, digest_of_file, entry, inside
from .damage import unrecorded
from .facts import container
from .locate import Site
from .processes import running
from .store import Store
from .undo import reinstalled


Look = TypeVar("Look", bound=Callable[..., Any])


def undisturbed(look: Look) -> Look:
    """Let `look`, which only reads, begin anew when a file goes away between two of its looks.

    That is somebody else's push or rollback at work; it says nothing about the host.
    """

    @functools.wraps(look)
    def again(*args: Any, **kwargs: Any) -> Any:
        for _ in range(20):
            try:
                return look(*args, **kwargs)
            except FileNotFoundError:
                time.sleep(0.05)
        return look(*args, **kwargs)

    return cast("Look", again)


def live_view(store: Store, paths: set[str]) -> dict[str, str | None]:
    """Digests of `paths` as they will be once an interrupted run has been put back."""
    live = {p: digest_of_file(inside(store.root, p)) for p in paths}
    journal = store.interrupted()
    for move in journal["moves"] if journal else ():
        # What an installer has put there since is not touched by the recovery.
        if move["path"] in paths and not reinstalled(store, move):
            live[move["path"]] = move["from"]
    return live


def plan_facts(site: Site, store: Store, actions: list[planning.Action], refusals: list[Refusal]) -> dict[str, Any]:
    """The part of a plan that push and rollback have in common; completes `actions` with attributes of the files."""
    for action in actions:
        found = entry(site.root, action["path"]) or {}
        action.update({k: found.get(k) for k in ("mode", "owner", "nlink")})
    return {
        "actions": actions,
        "blockers": [r.as_dict() for r in refusals],
        "processes": running(),
        "container": container(site.root),
        "unfinished": unfinished(store),
    }


def unfinished(store: Store) -> str:
    """A sentence about a run that has not ended, or ""."""
    holder = store.holder()
    if holder:
        return f"{holder['operator'] or 'somebody'} is running a {holder['doing']} here (pid {holder['pid']})"
    journal = store.interrupted()
    if journal:
        event = journal["event"]
        return f"a {event['event']} of {event['id']} was interrupted; the next push or rollback puts it back first"
    if store.purging():
        return f"the removal of {store.folder} was cut off; the next push or rollback finishes it"
    if store.journal() or store.leftovers() or store.bare():
        return f"a run that was cut off has left files in {store.folder}; the next push or rollback removes them"
    return ""


def refuse_unsettled(store: Store) -> None:
    """Refuse to take files for a version of anything while they are half old and half new.

    Raises:
        Refusal: `conflict`.
    """
    holder = store.holder()
    if holder:
        raise Refusal(
            "conflict",
            f"{holder['operator'] or 'somebody'} is running a {holder['doing']} here (pid {holder['pid']})",
            why="the files are being changed",
            next_step="wait until it is done, then run the same command again",
        )
    journal = store.interrupted()
    if journal:
        event = journal["event"]
        raise Refusal(
            "conflict",
            f"a {event['event']} of {event['id']} was interrupted here: its files are half old and half new",
            # Going back to what is live puts the interrupted run back, and does nothing else.
            next_step=f"ddtree-overlay rollback {{target}} --to {event['before'] or 'base'}  # puts it back",
        )


def lost_record(store: Store) -> dict[str, Any] | None:
    """As `damage.unrecorded`, for a caller without the lock: None while somebody is swapping files or was cut off."""
    if store.journal() or store.holder():
        return None
    found = unrecorded(store)
    # Somebody may have begun and committed while the files were read.
    return found if found and not store.journal() and not store.holder() and unrecorded(store) else None


def refuse_unrecorded(record: dict[str, Any] | None, store: Store) -> None:
    """Refuse to build on the files of a deployment that the history does not know.

    Raises:
        Refusal: `conflict`.
    """
    if record:
        raise Refusal(
            "conflict",
            f"{record['id']} is in place, but the history in {store.folder} does not say so: it is damaged",
            why="its files are in the tree, and its line in history.jsonl is missing",
            next_step="ddtree-overlay rollback {target}  # goes by the record of the deployment",
        )


def check_plan(actions: list[planning.Action], expect: list[list[Any]]) -> None:
    """Refuse when `actions` are not those of the plan, `expect` (path, digest before, digest after).

    Raises:
        Refusal: `conflict`; nothing was written.
    """
    now = {a["path"]: (a["from"], a["to"]) for a in actions}
    planned = {path: (before, after) for path, before, after in expect}
    stale = sorted(p for p in {*now, *planned} if now.get(p) != planned.get(p))
    stale += [a["path"] for a in actions if a["action"] == "conflict" and a["path"] not in stale]
    if stale:
        more = f" and {len(stale) - 1} more" if len(stale) > 1 else ""
        raise Refusal(
            "conflict",
            f"the plan is stale: {stale[0]}{more} changed on the host since it was made",
            why="nothing was written",
            next_step="ddtree-overlay diff {target}  # then plan again",
        )


def raise_first(refusals: list[Refusal]) -> None:
    """Raise the first of `refusals`, if there is one."""
    if refusals:
        raise refusals[0]


def absent_folders(store: Store, paths: Iterable[str]) -> set[str]:
    """Folders (compiled-file folders included) that are not there yet and will come with the overlay."""
    found = set()
    for path in paths:
        parents = [str(p) for p in PurePosixPath(path).parents if str(p) != "."]
        if parents:
            parents.append(f"{parents[0]}/__pycache__")
        found |= {p for p in parents if not (store.root / p).is_dir()}
    return found


def history_event(
    record: dict[str, Any], kind: str, current: str | None, before: str | None, operator: str
) -> dict[str, Any]:
    """The line for the history that commits `kind` of the deployment `record`."""
    return {
        "event": kind,
        "id": record["id"],
        "overlay_id": record["overlay_id"],
        "current": current,
        "before": before,
        "operator": operator,
        "note": "",
        # So that the history still tells what was deployed when the record is gone.
        **{k: record[k] for k in ("base_id", "release", "version")},
        "files": len(record["files"]),
    }


def rebuild_history(store: Store, lost: dict[str, Any]) -> None:
    """Write the lines that the history has lost, from the records of the deployments."""
    known = {e["id"] for e in store.events()}
    chain: list[dict[str, Any]] = []
    step: dict[str, Any] | None = lost
    while step is not None and step["id"] not in known:
        chain.append(step)
        below = step["previous"]
        # A deployment that was pruned has no record any more, and no line in a history that is lost.
        step = store.record(below) if below and store.deployment(below).exists() else None
    for record in reversed(chain or [lost]):
        event = history_event(record, "push", record["id"], record["previous"], record["operator"])
        written = (store.deployment(record["id"]) / "manifest.json").stat().st_mtime
        note = "its line was lost, and rebuilt from its record"
        store.append({**event, "note": note, "txn": store.next_txn(), "time": written})
