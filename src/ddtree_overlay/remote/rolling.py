# SPDX-License-Identifier: Apache-2.0
"""Rollback: back to the files of an earlier deployment, or to those before any."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from . import planning, transaction
from .common import Refusal, digest_of_file, inside
from .damage import MARK, marked, unrecorded
from .grounds import (
    absent_folders,
    check_plan,
    history_event,
    live_view,
    lost_record,
    plan_facts,
    raise_first,
    rebuild_history,
    refuse_unrecorded,
    undisturbed,
)
from .locate import Site, locate
from .preflight import blockers, keepers
from .reading import describe
from .standing import Standing, groundless, standing
from .states import end, states
from .store import Store
from .undo import Move


Answer = tuple[dict[str, Any], bytes]
Record = dict[str, Any]
#: What `to` is called when no overlay at all shall be left.
BASE = "base"


@undisturbed
def plan_rollback(args: dict[str, Any], _: bytes) -> Answer:
    """What a rollback to `to` (an id, "base", or None for one step) would do here now. Reads only."""
    site = locate(args, orphans=True)
    store = Store(site.state, site.root)
    lost = lost_record(store)
    record, target, undoes = _rollback_range(store, args, lost)
    if record is None and not store.journal() and not store.holder() and marked(store):
        raise _unknown_overlay(site)
    found = standing(site, store, record)
    actions, left = _rollback_actions(store, found, target)
    todo = [a["path"] for a in actions if a["action"] not in ("same", "conflict")]
    refusals = [
        *(groundless(site, found, purge=args["purge"]) if undoes else ()),
        *blockers(site, todo, _bytes_needed(site, todo)),
        *_damaged(store, record, target, actions),
    ]
    if args["purge"] and target is None:
        refusals += keepers(store.folder)
    result = {**describe(site, args), **plan_facts(site, store, actions, refusals), "left": left}
    result.update(state=found.state, reason=found.reason)
    names = {"current": record["id"] if record else None, "to": target["id"] if target else BASE, "undoes": undoes}
    return {**result, **names, "state_folder": store.folder.is_dir(), "lost": bool(lost)}, b""


def _bytes_needed(site: Site, paths: list[str]) -> int:
    """The copies for a way back in the middle, and the files themselves, which are about as big."""
    live = [inside(site.root, path) for path in paths]
    return 2 * sum(p.stat().st_size for p in live if p.is_file())


def _unknown_overlay(site: Site) -> Refusal:
    return Refusal(
        "conflict",
        f"an overlay is in place in {site.root}, but nothing on the host says what was there before",
        why=f"no deployment in {site.state} put it there",
        next_step=(
            f"# on the host:\nrm -r {shlex.quote(str(site.root / MARK))}\n"
            f"{shlex.quote(sys.executable)} -m pip install --force-reinstall --no-deps "
            f"sglang=={site.version or 'VERSION'}"
        ),
    )


def _rollback_range(
    store: Store, args: dict[str, Any], lost: Record | None
) -> tuple[Record | None, Record | None, list[str]]:
    """The live deployment, the one to go back to, and the ids in between; `lost` is live without a line in history."""
    record, to = lost or store.current(), args["to"]
    if to is None and args["purge"]:
        to = BASE
    chain: list[Record] = []
    step = record
    pruned = store.pruned()
    while step is not None:
        chain.append(step)
        below = step["previous"]
        step = store.record(below) if below and below not in pruned else None
    names = [c["id"] for c in chain]
    if to is None:
        # A deployment that failed is no place to go back to (capistrano#1885).
        known = states(store.events())
        at = next((i for i, name in enumerate(names) if i and known.get(name) != "bad"), len(chain))
        if chain and at == len(chain) and chain[-1]["previous"] in pruned:
            raise _cut(chain[-1])
        return record, chain[at] if at < len(chain) else None, names[:at]
    if to == BASE:
        return record, None, names
    if to not in names:
        why = f"these can be gone back to: {', '.join([*names, BASE])}"
        raise Refusal(
            "failed", f"{to} is not below the live deployment", why=why, next_step="ddtree-overlay history {target}"
        )
    at = names.index(to)
    return record, chain[at], names[:at]


def _cut(record: Record) -> Refusal:
    return Refusal(
        "failed",
        f"{record['previous']}, which was live before {record['id']}, was pruned: its files are not kept any more",
        why="only the last deployments are kept; the files from before any overlay are kept with each",
        next_step="ddtree-overlay rollback {target} --to base",
    )


def _rollback_actions(store: Store, found: Standing, target: Record | None) -> tuple[list[planning.Action], list[str]]:
    record = found.record
    if record is None or (target and target["id"] == record["id"]):
        return [], []
    paths = {*record["files"], *(target["files"] if target else ())}
    # An uninstalled package lists no file any more.
    listed = () if found.state == "orphaned" else found.listed
    return planning.plan_rollback(record, target, live_view(store, paths), replaced=found.base_gone, listed=listed)


def _rollback_moves(actions: list[planning.Action], record: Record, target: Record | None) -> list[Move]:
    return [_move(a, record, target) for a in actions if a["action"] != "same"]


def _move(action: planning.Action, record: Record, target: Record | None) -> Move:
    path = action["path"]
    if target and path in target["files"]:
        place = f"deployments/{target['id']}/after/{path}"
        return {**action, "source": place, "exact": False, "bytecode": {}}
    own = record["files"][path]
    return {**action, "source": own["source"], "exact": True, "bytecode": own["bytecode"]}


def _damaged(
    store: Store, record: Record | None, target: Record | None, actions: list[planning.Action]
) -> list[Refusal]:
    if record is None:
        return []
    moves = _rollback_moves([a for a in actions if a["action"] != "conflict"], record, target)
    kept = [(m["path"], store.folder / str(m["source"]), m["to"]) for m in moves if m["to"] is not None]
    return [_no_backup(path, place) for path, place, goal in kept if digest_of_file(place) != goal]


def _no_backup(path: str, place: Path) -> Refusal:
    return Refusal(
        "failed",
        f"the backup of {path} is missing or damaged: {place}",
        why="nothing was changed",
        next_step="reinstall SGLang on the host, then ddtree-overlay rollback {target} --purge",
    )


def rollback(args: dict[str, Any], _: bytes) -> Answer:
    """Carry out a rollback plan: `to`, `purge`, and `expect`, the plan's actions."""
    site = locate(args, orphans=True)
    store = Store(site.state, site.root)
    if not store.folder.is_dir():
        none = dict.fromkeys(("restored", "removed", "folders", "verified"), 0)
        return {**none, "undone": [], "to": BASE, "purged": False, "recovered": ""}, b""
    if args.get("trial"):
        return _rollback_and_try(site, store, args), b""
    with transaction.session(store, args["operator"], "rollback", args["lock_wait"], version=site.version) as note:
        result = _rollback_locked(site, store, args)
        end(store)
        return {**result, "recovered": note}, b""


def _rollback_and_try(site: Site, store: Store, args: dict[str, Any]) -> dict[str, Any]:
    from . import trials

    trials.check(args["trial"])
    doing = "rollback with a restart"
    with transaction.session(store, args["operator"], doing, args["lock_wait"], version=site.version) as note:
        before = trials.look(args["trial"])
        result = {**_rollback_locked(site, store, args), "recovered": note}
        return {**result, "proof": trials.after_rollback(site, store, args, before)}


def _rollback_locked(site: Site, store: Store, args: dict[str, Any]) -> dict[str, Any]:
    lost = unrecorded(store)
    record, target, undoes = _rollback_range(store, args, lost)
    found = standing(site, store, record)
    raise_first(groundless(site, found, purge=args["purge"]) if undoes else [])
    actions, left = _rollback_actions(store, found, target)
    check_plan(actions, args["expect"])
    if args["purge"] and target is None:
        # Half of the backups gone and the rest another user's would be worse than all of them there.
        raise_first(keepers(store.folder))
    if lost:
        rebuild_history(store, lost)
    folders = 0
    if record is not None and undoes:
        folders = _undo_deployments(site, store, args["operator"], record=record, target=target, actions=actions)
    kinds = [a["action"] for a in actions]
    purged = bool(args["purge"] and target is None)
    if purged:
        # The backups go only when nothing is in the tree that they could be needed for.
        refuse_unrecorded(unrecorded(store), store)
        if record is None and marked(store):
            raise _unknown_overlay(site)
        _purge(site, store)
    return {
        "undone": undoes,
        "to": target["id"] if target else BASE,
        "left": left,
        "folders": folders,
        "restored": sum(k in ("change", "add") for k in kinds),
        "removed": kinds.count("remove"),
        "verified": sum(digest_of_file(inside(site.root, a["path"])) == a["to"] for a in actions),
        "purged": purged,
    }


def go_back(site: Site, store: Store, operator: str, *, to: str, note: str) -> None:
    """Go back to `to` without a plan that anybody has seen; the caller holds the lock.

    Raises:
        Refusal: Somebody has changed a file meanwhile, or as `transaction.run`.
    """
    record, target, undoes = _rollback_range(store, {"to": to, "purge": False}, None)
    actions, _ = _rollback_actions(store, standing(site, store, record), target)
    check_plan(actions, [[a["path"], a["from"], a["to"]] for a in actions])
    if record is not None and undoes:
        _undo_deployments(site, store, operator, record=record, target=target, actions=actions, note=note)


def _purge(site: Site, store: Store) -> None:
    try:
        # Folders that the rollback itself could not remove: nobody will know of them without the journal.
        transaction.recover(store, site.version)
        _drop_orphaned_root(site)
        store.purge()
    except OSError as e:
        raise Refusal(
            "failed",
            f"no overlay is left, but its backups and history in {store.folder} could not be removed",
            why=f"{e.filename or store.folder}: {e.strerror or e}",
            next_step="ddtree-overlay rollback {target} --purge  # when that is mended",
        ) from e


def _undo_deployments(
    site: Site,
    store: Store,
    operator: str,
    *,
    record: Record,
    target: Record | None,
    actions: list[planning.Action],
    note: str = "",
) -> int:
    moves = _rollback_moves(actions, record, target)
    paths = [m["path"] for m in moves]
    raise_first(blockers(site, paths, _bytes_needed(site, paths)))
    raise_first(_damaged(store, record, target, actions))
    keep = set(target["absent_folders"]) if target else set()
    drop = [f for f in sorted(record["absent_folders"], reverse=True) if f not in keep]
    make = sorted(absent_folders(store, [m["path"] for m in moves if m["to"] is not None]))
    before = [f for f in drop if (site.root / f).is_dir()]
    event = history_event(record, "rollback", target["id"] if target else None, record["id"], operator)
    event["note"] = note
    transaction.run(store, moves, event, make=[m for m in make if not m.endswith("__pycache__")], drop=drop)
    return sum(not (site.root / f).is_dir() for f in before)


def _drop_orphaned_root(site: Site) -> None:
    """Remove what is left of an uninstalled package's folder, if the overlay alone kept it alive."""
    if site.importable or not site.root.is_dir():
        return
    for folder, _, _ in os.walk(site.root, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(folder)
