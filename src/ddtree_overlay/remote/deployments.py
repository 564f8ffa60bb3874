# SPDX-License-Identifier: Apache-2.0
"""Push and rollback: from a plan that the operator has seen to a transaction that does exactly that."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from . import planning, transaction
from .common import Refusal, digest, digest_of_file, entry, inside, split
from .locate import Site, locate
from .preflight import blockers
from .probe import syntax_errors
from .processes import running
from .reading import describe
from .store import Store, write_durably


Answer = tuple[dict[str, Any], bytes]
Record = dict[str, Any]
BASE = "base"


def live_view(site: Site, store: Store, paths: set[str]) -> dict[str, str | None]:
    """Digests of `paths` as they will be once an interrupted run has been put back."""
    live = {p: digest_of_file(inside(site.root, p)) for p in paths}
    journal = store.journal()
    if journal and not any(e["txn"] == journal["txn"] for e in store.events()):
        live.update({m["path"]: m["from"] for m in journal["moves"] if m["path"] in paths})
    return live


# Push ------------------------------------------------------------------------------------------------------------


def plan_push(args: dict[str, Any], _: bytes) -> Answer:
    """What a push of `changes` (path, base, after, size) would do here now. Reads only."""
    site = locate(args)
    store = Store(site.state)
    actions, record = _push_actions(args["changes"], site, store)
    todo = [a for a in actions if a["action"] not in ("same", "conflict")]
    refusals = blockers(site, [a["path"] for a in todo], _bytes_needed(args["changes"]))
    unknown = planning.unknown_base(actions, args["changes"], record)
    if unknown and todo:
        refusals.append(_no_base(unknown))
    result = {**describe(site, args), **_plan_facts(site, store, actions, refusals), "unknown_base": unknown}
    return {**result, "deployment": record["id"] if record else None}, b""


def _push_actions(
    changes: list[dict[str, Any]], site: Site, store: Store
) -> tuple[list[planning.Action], Record | None]:
    record = store.current()
    paths = {c["path"] for c in changes} | set(record["files"] if record else ())
    return planning.plan_push(changes, live_view(site, store, paths), record), record


def _plan_facts(site: Site, store: Store, actions: list[planning.Action], refusals: list[Refusal]) -> dict[str, Any]:
    from .facts import container

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
    journal, holder = store.journal(), store.holder()
    if holder:
        return f"{holder['operator'] or 'somebody'} is running a {holder['doing']} here (pid {holder['pid']})"
    if journal:
        event = journal["event"]
        return f"a {event['event']} of {event['id']} was interrupted; the next push or rollback puts it back first"
    return ""


def _bytes_needed(changes: list[dict[str, Any]]) -> int:
    # The staged copy and the file itself; backups are second names of what is already there.
    return 2 * sum(int(c["size"]) for c in changes)


def _no_base(paths: list[str]) -> Refusal:
    return Refusal(
        "conflict",
        f"{paths[0]} is patched already, but no deployment here recorded what it was before",
        why="without its base a rollback would be impossible",
        next_step="reinstall SGLang on the host, then ddtree-overlay push {target}",
    )


def push(args: dict[str, Any], payload: bytes) -> Answer:
    """Carry out a plan: `changes` with their bytes in `payload`, and `expect`, the plan's actions."""
    site = locate(args)
    store = Store(site.state)
    changes = args["changes"]
    staged = dict(zip([c["path"] for c in changes], split(payload, [c["size"] for c in changes])))
    wrong = [c["path"] for c in changes if digest(staged[c["path"]]) != c["after"]]
    if wrong:
        raise Refusal("connection", f"{wrong[0]} arrived damaged", why="nothing was changed")
    _refuse_early(site, store, args)
    with store.locked(args["operator"], "push", args["lock_wait"]):
        try:
            return _push_locked(site, store, args, staged), b""
        finally:
            store.tidy()


def _push_locked(site: Site, store: Store, args: dict[str, Any], staged: dict[str, bytes]) -> dict[str, Any]:
    changes = args["changes"]
    note = transaction.recover(store, site)
    actions, record = _push_actions(changes, site, store)
    _check_plan(actions, args["expect"])
    todo = [a for a in actions if a["action"] != "same"]
    if not todo:
        return {"deployment": record["id"] if record else None, "noop": True, "recovered": note}
    _refuse_unsafe(site, todo, changes, planning.unknown_base(actions, changes, record))
    name = _deploy(site, store, args, staged, actions, record)
    return {"deployment": name, "noop": False, "recovered": note}


def _refuse_early(site: Site, store: Store, args: dict[str, Any]) -> None:
    """Refuse a stale plan before even the state folder is created."""
    actions, _ = _push_actions(args["changes"], site, store)
    if not store.holder():
        _check_plan(actions, args["expect"])
    if any(a["action"] != "same" for a in actions):
        todo = [a["path"] for a in actions if a["action"] != "same"]
        _raise_first(blockers(site, todo, _bytes_needed(args["changes"])))


def _refuse_unsafe(site: Site, todo: list[planning.Action], changes: list[dict[str, Any]], unknown: list[str]) -> None:
    _raise_first(blockers(site, [a["path"] for a in todo], _bytes_needed(changes)))
    if unknown:
        raise _no_base(unknown)


def _raise_first(refusals: list[Refusal]) -> None:
    if refusals:
        raise refusals[0]


def _check_plan(actions: list[planning.Action], expect: list[list[Any]]) -> None:
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
            next_step="ddtree-overlay diff {target}, then plan again",
        )


def _deploy(
    site: Site,
    store: Store,
    args: dict[str, Any],
    staged: dict[str, bytes],
    actions: list[planning.Action],
    record: Record | None,
) -> str:
    errors = syntax_errors(staged)
    if errors:
        first = errors[0]
        raise Refusal(
            "failed",
            f"{first['path']}:{first['line']}: {first['message']}",
            why="the patched file does not compile under the host's Python; nothing was written",
            next_step="ddtree-overlay verify {target}",
        )
    name = store.new_deployment()
    files = {c["path"]: _remember(site, store, name, c, record) for c in args["changes"]}
    for path, data in staged.items():
        place = store.deployment(name) / "after" / path
        place.parent.mkdir(parents=True, exist_ok=True)
        write_durably(place, data)
    new = {
        **{k: args[k] for k in ("overlay_id", "base_id", "release", "operator")},
        "id": name,
        "previous": record["id"] if record and _same_base(files, record, site) else None,
        "version": site.version,
        "install": site.install,
        "files": files,
        "absent_folders": sorted({*_absent(site, files), *(record["absent_folders"] if record else ())}),
    }
    store.write(store.deployment(name) / "manifest.json", new)
    moves = [_move(a, f"deployments/{name}/after/{a['path']}", new, record) for a in actions if a["action"] != "same"]
    make = [f for f in new["absent_folders"] if not f.endswith("__pycache__") and any(_below(p, f) for p in files)]
    event = _event(new, "push", name, record["id"] if record else None, args["operator"])
    drop = [f for f in reversed(record["absent_folders"])] if record else []
    transaction.run(store, site, moves, event, make, drop)
    return name


def _same_base(files: Record, record: Record, site: Site) -> bool:
    """Whether going back to `record` makes sense: not when the package was upgraded in between."""
    common = files.keys() & record["files"].keys()
    return site.version == record["version"] and all(files[p]["base"] == record["files"][p]["base"] for p in common)


def _below(path: str, folder: str) -> bool:
    return PurePosixPath(folder) in PurePosixPath(path).parents


def _event(record: Record, kind: str, current: str | None, before: str | None, operator: str) -> dict[str, Any]:
    return {
        "event": kind,
        "id": record["id"],
        "overlay_id": record["overlay_id"],
        "current": current,
        "before": before,
        "operator": operator,
        "note": "",
    }


def _remember(site: Site, store: Store, name: str, change: dict[str, Any], record: Record | None) -> Record:
    """Keep what `change["path"]` was before any overlay: the live file, or what an earlier deployment kept."""
    path, full = change["path"], inside(site.root, change["path"])
    own = record["files"].get(path) if record else None
    kept = {"after": change["after"], "base": None, "source": None, "bytecode": {}}
    if own and digest_of_file(full) == own["after"]:
        kept["base"] = own["base"]
        if own["source"]:
            kept["source"] = transaction.keep_in(store, f"deployments/{name}/base/{path}", store.folder / own["source"])
        for compiled, place in own["bytecode"].items():
            target = f"deployments/{name}/bytecode/{compiled}"
            kept["bytecode"][compiled] = transaction.keep_in(store, target, store.folder / place)
    elif change["base"] is not None:
        kept["base"] = change["base"]
        kept["source"] = transaction.keep_in(store, f"deployments/{name}/base/{path}", full)
        kept["bytecode"] = transaction.keep_bytecode(store, site, f"deployments/{name}/bytecode", full)
    return kept


def _absent(site: Site, paths: Any) -> set[str]:
    """Folders (compiled-file folders included) that are not there yet and will come with the overlay."""
    found = set()
    for path in paths:
        parents = [str(p) for p in PurePosixPath(path).parents if str(p) != "."]
        if parents:
            parents.append(f"{parents[0]}/__pycache__")
        found |= {p for p in parents if not (site.root / p).is_dir()}
    return found


def _move(action: planning.Action, staged: str, new: Record, record: Record | None) -> transaction.Move:
    path = action["path"]
    if path in new["files"]:
        return {**action, "source": staged, "exact": False, "bytecode": {}}
    own = record["files"][path] if record else {"source": None, "bytecode": {}}
    return {**action, "source": own["source"], "exact": True, "bytecode": own["bytecode"]}


# Rollback --------------------------------------------------------------------------------------------------------


def plan_rollback(args: dict[str, Any], _: bytes) -> Answer:
    """What a rollback to `to` (an id, "base", or None for one step) would do here now. Reads only."""
    site = locate(args, orphans=True)
    store = Store(site.state)
    record, target, undoes = _rollback_range(store, args)
    actions, left = _rollback_actions(site, store, record, target)
    todo = [a["path"] for a in actions if a["action"] not in ("same", "conflict")]
    refusals = [*blockers(site, todo, 0), *_damaged(store, record, target, actions)]
    result = {**describe(site, args), **_plan_facts(site, store, actions, refusals), "left": left}
    names = {"current": record["id"] if record else None, "to": target["id"] if target else BASE, "undoes": undoes}
    return {**result, **names, "state_folder": store.folder.is_dir()}, b""


def _rollback_range(store: Store, args: dict[str, Any]) -> tuple[Record | None, Record | None, list[str]]:
    record, to = store.current(), args["to"]
    if to is None and args["purge"]:
        to = BASE
    chain: list[Record] = []
    step = record
    while step is not None:
        chain.append(step)
        step = store.record(step["previous"]) if step["previous"] else None
    names = [c["id"] for c in chain]
    if to is None:
        return record, chain[1] if len(chain) > 1 else None, names[:1]
    if to == BASE:
        return record, None, names
    if to not in names:
        known = ", ".join([*names, BASE])
        why = f"these can be gone back to: {known}"
        raise Refusal(
            "failed", f"{to} is not below the live deployment", why=why, next_step="ddtree-overlay history {target}"
        )
    at = names.index(to)
    return record, chain[at], names[:at]


def _rollback_actions(
    site: Site, store: Store, record: Record | None, target: Record | None
) -> tuple[list[planning.Action], list[str]]:
    if record is None or (target and target["id"] == record["id"]):
        return [], []
    paths = {*record["files"], *(target["files"] if target else ())}
    replaced = not site.importable or site.version != record["version"]
    return planning.plan_rollback(record, target, live_view(site, store, paths), replaced=replaced)


def _rollback_moves(actions: list[planning.Action], record: Record, target: Record | None) -> list[transaction.Move]:
    moves = []
    for action in actions:
        path = action["path"]
        if action["action"] == "same":
            continue
        if target and path in target["files"]:
            place = f"deployments/{target['id']}/after/{path}"
            moves.append({**action, "source": place, "exact": False, "bytecode": {}})
        else:
            own = record["files"][path]
            moves.append({**action, "source": own["source"], "exact": True, "bytecode": own["bytecode"]})
    return moves


def _damaged(
    store: Store, record: Record | None, target: Record | None, actions: list[planning.Action]
) -> list[Refusal]:
    if record is None:
        return []
    found = []
    for move in _rollback_moves([a for a in actions if a["action"] != "conflict"], record, target):
        if move["to"] is not None and digest_of_file(store.folder / str(move["source"])) != move["to"]:
            found.append(
                Refusal(
                    "failed",
                    f"the backup of {move['path']} is missing or damaged: {store.folder / str(move['source'])}",
                    why="nothing was changed",
                    next_step="reinstall SGLang on the host, then ddtree-overlay rollback {target} --purge",
                )
            )
    return found


def rollback(args: dict[str, Any], _: bytes) -> Answer:
    """Carry out a rollback plan: `to`, `purge`, and `expect`, the plan's actions (None: whatever is right now)."""
    site = locate(args, orphans=True)
    store = Store(site.state)
    if not store.folder.is_dir():
        return {
            "undone": [],
            "to": BASE,
            "restored": 0,
            "removed": 0,
            "folders": 0,
            "purged": False,
            "verified": 0,
        }, b""
    with store.locked(args["operator"], "rollback", args["lock_wait"]):
        note = transaction.recover(store, site)
        record, target, undoes = _rollback_range(store, args)
        actions, left = _rollback_actions(site, store, record, target)
        _check_plan(
            actions, [[a["path"], a["from"], a["to"]] for a in actions] if args["expect"] is None else args["expect"]
        )
        result: dict[str, Any] = {
            "undone": undoes,
            "to": target["id"] if target else BASE,
            "left": left,
            "recovered": note,
        }
        result["folders"] = 0
        if record is not None and undoes:
            result["folders"] = _undo_deployments(site, store, args, record, target, actions)
        kinds = [a["action"] for a in actions]
        result["restored"] = sum(k in ("change", "add") for k in kinds)
        result["removed"] = kinds.count("remove")
        result["verified"] = sum(digest_of_file(inside(site.root, a["path"])) == a["to"] for a in actions)
        result["purged"] = bool(args["purge"] and target is None)
        if result["purged"]:
            _drop_orphaned_root(site)
            store.purge()
    return result, b""


def _undo_deployments(
    site: Site,
    store: Store,
    args: dict[str, Any],
    record: Record,
    target: Record | None,
    actions: list[planning.Action],
) -> int:
    moves = _rollback_moves(actions, record, target)
    _raise_first(blockers(site, [m["path"] for m in moves], 0))
    _raise_first(_damaged(store, record, target, actions))
    keep = set(target["absent_folders"]) if target else set()
    drop = [f for f in sorted(record["absent_folders"], reverse=True) if f not in keep]
    make = sorted(_absent(site, [m["path"] for m in moves if m["to"] is not None]))
    before = [f for f in drop if (site.root / f).is_dir()]
    event = _event(record, "rollback", target["id"] if target else None, record["id"], args["operator"])
    transaction.run(store, site, moves, event, [m for m in make if not m.endswith("__pycache__")], drop)
    return sum(not (site.root / f).is_dir() for f in before)


def _drop_orphaned_root(site: Site) -> None:
    """Remove what is left of an uninstalled package's folder, if the overlay alone kept it alive."""
    import contextlib
    import os

    if site.importable or not site.root.is_dir():
        return
    for folder, _, _ in os.walk(site.root, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(folder)
