# SPDX-License-Identifier: Apache-2.0
"""Push: from a plan that the operator has seen to a transaction that does exactly that."""

from __future__ import annotations

import contextlib
from pathlib import PurePosixPath
from typing import Any

from . import planning, stages, transaction
from .common import Refusal, digest, digest_of_file, inside, split
from .damage import marked, unrecorded
from .durable import write_durably
from .grounds import (
    absent_folders,
    check_plan,
    history_event,
    live_view,
    lost_record,
    plan_facts,
    raise_first,
    refuse_unrecorded,
    undisturbed,
)
from .locate import Site, locate
from .preflight import blockers
from .probe import syntax_errors
from .pruning import prune
from .reading import describe
from .reporting import one
from .standing import Standing, below, refuse_half, refuse_mixed, standing, unfit
from .states import end
from .store import Store
from .undo import Move


Answer = tuple[dict[str, Any], bytes]
Record = dict[str, Any]


@undisturbed
def plan_push(args: dict[str, Any], _: bytes) -> Answer:
    """What a push of one of `candidates` would do here now. Reads only.

    A candidate is a list of changes (path, base, after, size), made for the release in `releases` with its index. Of
    those for the base that is here the first is meant; when none is for it, the first for the release that is here, or
    of all, so that its conflicts can be shown. `chosen` is its index.
    """
    site = locate(args)
    store = Store(site.state, site.root)
    refuse_unrecorded(lost_record(store), store)
    candidates: list[list[dict[str, Any]]] = args["candidates"]
    live = live_view(store, {c["path"] for changes in candidates for c in changes})
    found = standing(site, store, store.current())
    chosen = planning.choose(candidates, live, found.record)
    if chosen is None:
        chosen = args["releases"].index(site.version) if site.version in args["releases"] else 0
    changes = candidates[chosen]
    actions = push_actions(changes, store, found, live)
    record = found.record
    todo = [a for a in actions if a["action"] not in ("same", "conflict")]
    refusals = unfit(site, found, actions, args["releases"][chosen])
    refusals += blockers(site, [a["path"] for a in todo], bytes_needed(store, changes))
    unknown = planning.unknown_base(actions, changes, record)
    if unknown and todo:
        refusals.append(no_base(unknown))
    result = {**describe(site, args), **plan_facts(site, store, actions, refusals), "unknown_base": unknown}
    stray = record is None and not result["unfinished"] and marked(store)
    name = record["id"] if record else None
    state = {"state": found.state, "reason": found.reason, "left": found.left}
    return {**result, **state, "chosen": chosen, "deployment": name, "unrecorded": stray}, b""


def push_actions(
    changes: list[dict[str, Any]], store: Store, found: Standing, known: dict[str, str | None] | None = None
) -> list[planning.Action]:
    """The actions, given how things stand; `known` are digests that were just taken."""
    record = found.record
    paths = {c["path"] for c in changes} | set(record["files"] if record else ())
    live = known or {}
    view = {**live_view(store, paths - live.keys()), **live}
    return planning.plan_push(changes, view, record, replaced=found.base_gone, listed=found.listed)


def bytes_needed(store: Store, changes: list[dict[str, Any]]) -> int:
    """The staged copy and the file itself; the backup and the copy for a way back in the middle."""
    live = [inside(store.root, c["path"]) for c in changes]
    return 2 * sum(int(c["size"]) for c in changes) + 2 * sum(p.stat().st_size for p in live if p.is_file())


def no_base(paths: list[str]) -> Refusal:
    """The refusal of files that are patched, although nobody knows what they were."""
    return Refusal(
        "conflict",
        f"{paths[0]} is patched already, but no deployment here recorded what it was before",
        why="without its base a rollback would be impossible",
        next_step="reinstall SGLang on the host, then ddtree-overlay push {target}",
    )


def push(args: dict[str, Any], payload: bytes) -> Answer:
    """Carry out a plan: `changes` with their bytes in `payload` or in `stage`, and `expect`, the plan's actions."""
    site = locate(args)
    store = Store(site.state, site.root)
    name = args.get("stage")
    staged = {} if name else arrived(args["changes"], payload)
    refuse_early(site, store, args)
    trial = _trial(args)
    doing = "push with a restart" if trial else "push"
    with transaction.session(store, args["operator"], doing, args["lock_wait"], version=site.version) as note:
        try:
            # Under the lock: a push whose stage was taken away in time must not begin any more.
            staged = stages.bring(store, name, args["changes"]) if name else staged
            before = trial.look(args["trial"]) if trial else None
            was = (store.current() or {}).get("id")
            result = {**_push_locked(site, store, args, staged), "recovered": note}
            end(store)
            if trial and result["deployment"]:
                live = result["deployment"]["id"]
                proof = trial.after_push(site, store, args, live, before, swapped=live != was)
                result.update(deployment=one(store, live), proof=proof)
            return result, b""
        finally:
            if name:
                stages.drop(store, name)
            stages.sweep(store)


def _trial(args: dict[str, Any]) -> Any:
    """The module that restarts and proves, if that is asked for and can be done; few calls need it."""
    if not args.get("trial"):
        return None
    from . import trials

    trials.refuse_mute([c["path"] for c in args["changes"]])
    trials.check(args["trial"])
    return trials


def arrived(changes: list[dict[str, Any]], payload: bytes) -> dict[str, bytes]:
    """The bytes of each of `changes`, checked."""
    # Python 3.9 has no strict=; `split` has checked the sizes.
    files = dict(zip((c["path"] for c in changes), split(payload, [c["size"] for c in changes])))  # noqa: B905
    wrong = [c["path"] for c in changes if digest(files[c["path"]]) != c["after"]]
    if wrong:
        raise Refusal("connection", f"{wrong[0]} arrived damaged", why="nothing was changed")
    return files


def _push_locked(site: Site, store: Store, args: dict[str, Any], staged: dict[str, bytes]) -> dict[str, Any]:
    changes = args["changes"]
    refuse_unrecorded(unrecorded(store), store)
    found = standing(site, store, store.current())
    refuse_half(site, found)
    refuse_mixed(site, found, args["release"], [c["path"] for c in changes])
    actions, record = push_actions(changes, store, found), found.record
    todo = [a for a in actions if a["action"] != "same"]
    if todo:
        check_plan(actions, args["expect"])
    elif args.get("stage") and record:
        raise _overtaken(record)
    else:
        # Also when the plan had work to do: somebody else has pushed the same overlay while this push was waiting.
        return {"deployment": one(store, record["id"]) if record else None}
    _refuse_unsafe(site, store, todo, changes, unknown=planning.unknown_base(actions, changes, record))
    name = _deploy(site, store, args, staged=staged, actions=actions, found=found)
    with contextlib.suppress(OSError):
        # The push is done whatever becomes of old backups; the next one tries again.
        prune(store)
    return {"deployment": one(store, name)}


def _overtaken(record: Record) -> Refusal:
    """For one of several hosts: a deployment of somebody else must not be put back because another host fails."""
    return Refusal(
        "conflict",
        f"{record['operator'] or 'somebody'} has pushed the same overlay meanwhile, as {record['id']}",
        why="nothing was changed by this command",
        next_step="run the same command again",
    )


@undisturbed
def refuse_early(site: Site, store: Store, args: dict[str, Any]) -> None:
    """Refuse a stale plan before even the state folder is created."""
    refuse_unrecorded(lost_record(store), store)
    busy = store.holder()
    actions = push_actions(args["changes"], store, standing(site, store, store.current()))
    todo = [a["path"] for a in actions if a["action"] != "same"]
    if todo:
        # What was seen while somebody swaps files says nothing; under the lock everything is looked at again.
        if not busy and not store.holder():
            check_plan(actions, args["expect"])
        raise_first(blockers(site, todo, bytes_needed(store, args["changes"])))


def _refuse_unsafe(
    site: Site, store: Store, todo: list[planning.Action], changes: list[dict[str, Any]], *, unknown: list[str]
) -> None:
    raise_first(blockers(site, [a["path"] for a in todo], bytes_needed(store, changes)))
    if unknown:
        raise no_base(unknown)


def refuse_uncompilable(files: dict[str, bytes]) -> None:
    """Refuse files that are no Python for this interpreter."""
    errors = syntax_errors(files)
    if errors:
        first = errors[0]
        raise Refusal(
            "failed",
            f"{first['path']}:{first['line']}: {first['message']}",
            why="the patched file does not compile under the host's Python; nothing was written",
            next_step="ddtree-overlay verify {target}",
        )


def _deploy(
    site: Site,
    store: Store,
    args: dict[str, Any],
    *,
    staged: dict[str, bytes],
    actions: list[planning.Action],
    found: Standing,
) -> str:
    refuse_uncompilable(staged)
    record = found.record
    name = store.new_deployment()
    files = {c["path"]: _remember(store, name, c, record) for c in args["changes"]}
    for path, data in staged.items():
        place = store.deployment(name) / "after" / path
        place.parent.mkdir(parents=True, exist_ok=True)
        write_durably(place, data)
    new = {
        **{k: args[k] for k in ("overlay_id", "base_id", "release", "operator")},
        "id": name,
        "previous": below(args["overlay_id"], files, found, site),
        "version": site.version,
        "install": site.install,
        "files": files,
        "absent_folders": sorted({*absent_folders(store, files), *(record["absent_folders"] if record else ())}),
    }
    store.write(store.deployment(name) / "manifest.json", new)
    moves = [_move(a, f"deployments/{name}/after/{a['path']}", new, record) for a in actions if a["action"] != "same"]
    make = [f for f in new["absent_folders"] if not f.endswith("__pycache__") and any(_below(p, f) for p in files)]
    event = history_event(new, "push", name, record["id"] if record else None, args["operator"])
    if found.state in ("upgraded", "partial"):
        # What was left over is so no more.
        event["note"] = f"found before it: {found.reason.partition(';')[0]}"
    drop = list(reversed(record["absent_folders"])) if record else []
    transaction.run(store, moves, event, make=make, drop=drop)
    return name


def _below(path: str, folder: str) -> bool:
    return PurePosixPath(folder) in PurePosixPath(path).parents


def _remember(store: Store, name: str, change: dict[str, Any], record: Record | None) -> Record:
    """Keep what `change["path"]` was before any overlay: the live file, or what an earlier deployment kept."""
    path, full = change["path"], inside(store.root, change["path"])
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
        kept["bytecode"] = transaction.keep_bytecode(store, f"deployments/{name}/bytecode", full)
    return kept


def _move(action: planning.Action, staged: str, new: Record, record: Record | None) -> Move:
    path = action["path"]
    if path in new["files"]:
        return {**action, "source": staged, "exact": False, "bytecode": {}}
    own = record["files"][path] if record else {"source": None, "bytecode": {}}
    return {**action, "source": own["source"], "exact": True, "bytecode": own["bytecode"]}
