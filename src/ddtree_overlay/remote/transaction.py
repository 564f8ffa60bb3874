# SPDX-License-Identifier: Apache-2.0
"""Many files replaced or removed, all or none, whatever happens in between.

The order is the whole point: everything needed to go back is on disk before the journal, the journal is on disk before
the first file is replaced, and the line in the history, written last, is what makes the new state the valid one. A
journal without its line in the history means "put everything back"; with it, "only the tidying is left".

A *move* is one file of a transaction: `path`, `from` and `to` (digests, None = absent), `source` (where the bytes of
`to` are, relative to the state folder), `exact` (take mode, owner and times of `source` instead of those of the live
file), `bytecode` (compiled files that belong to `to`: package-relative path to place in the state folder).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import swap
from .common import Refusal, digest_of_file, inside
from .store import Store, fsync_folder


Move = dict[str, Any]


def run(store: Store, moves: list[Move], event: dict[str, Any], *, make: list[str], drop: list[str]) -> None:
    """Carry out `moves` and commit `event`, or put everything back.

    Args:
        store: The state folder; its lock is held.
        moves: What to do; every `from` has just been checked against the live file.
        event: The line for the history.
        make: Folders that the moves need, outermost first.
        drop: Folders to remove afterwards if they are empty, innermost first.

    Raises:
        Refusal: `rolled-back` if it failed and everything was put back, `incomplete` if something could not be.
    """
    event = {**event, "txn": len(store.events()), "time": time.time()}
    _prepare(store, moves)
    journal = {"txn": event["txn"], "event": event, "moves": moves, "make": make, "drop": drop, "pid": os.getpid()}
    store.write(store.folder / "journal.json", journal)
    try:
        _apply(store, journal)
        store.append(event)
    except BaseException as cause:
        _give_up(store, journal, cause)
    store.clear_journal()


def recover(store: Store) -> str:
    """Finish what an interrupted run began; the caller holds the lock.

    Returns:
        A sentence about what was done, or "" when there was nothing to do.

    Raises:
        Refusal: `incomplete`, when something could not be put back.
    """
    journal = store.journal()
    if journal is None:
        return ""
    event = journal["event"]
    if any(e["txn"] == journal["txn"] for e in store.events()):
        store.clear_journal()
        return f"tidied up after the {event['event']} of {event['id']}, which was complete"
    _undo_or_refuse(store, journal, "it was interrupted")
    store.append(_failure(journal, "recovered", "interrupted; put back at the next contact"))
    store.clear_journal()
    return f"the interrupted {event['event']} of {event['id']} was put back first"


def _failure(journal: dict[str, Any], kind: str, note: str) -> dict[str, Any]:
    event = journal["event"]
    current = event["before"]
    return {**event, "event": kind, "of": event["event"], "current": current, "note": note, "time": time.time()}


def _prepare(store: Store, moves: list[Move]) -> None:
    store.clear_journal()
    for move in moves:
        full = inside(store.root, move["path"])
        if move["from"] is not None:
            keep_in(store, f"undo/files/{move['path']}", full)
        move["undo_bytecode"] = keep_bytecode(store, "undo/bytecode", full)
    sync_tree(store.folder)


def keep_in(store: Store, place: str, path: Path) -> str:
    """Keep `path` at `place` in the state folder; gives `place`."""
    target = store.folder / place
    target.parent.mkdir(parents=True, exist_ok=True)
    swap.keep(path, target)
    return place


def keep_bytecode(store: Store, place: str, path: Path) -> dict[str, str]:
    """Keep the compiled files of the module at `path` that lie in the package: package path to place."""
    kept = {}
    for compiled in swap.bytecode_of(path):
        with contextlib.suppress(ValueError):
            name = compiled.relative_to(store.root).as_posix()
            kept[name] = keep_in(store, f"{place}/{name}", compiled)
    return kept


def sync_tree(folder: Path) -> None:
    """Make every name below `folder` durable."""
    for current, _, _ in os.walk(folder):
        fsync_folder(Path(current))


def _apply(store: Store, journal: dict[str, Any]) -> None:
    for folder in journal["make"]:
        swap.make_folder(inside(store.root, folder))
    for move in journal["moves"]:
        now = digest_of_file(inside(store.root, move["path"]))
        if now != move["from"]:
            raise Refusal("conflict", f"{move['path']} changed during the swap")
        _settle(store, move["path"], move["to"], move["source"], exact=move["exact"], bytecode=move["bytecode"])
    wrong = _mismatches(store, ((m["path"], m["to"]) for m in journal["moves"]))
    if wrong:
        raise Refusal("failed", f"after the swap these files are not as planned: {', '.join(wrong)}")
    _drop(store, journal["drop"])


def _settle(
    store: Store, path: str, want: str | None, source: str | None, *, exact: bool, bytecode: dict[str, str]
) -> None:
    full = inside(store.root, path)
    if digest_of_file(full) != want:
        if want is None:
            swap.remove(full)
        elif source is None:
            raise Refusal("failed", f"no copy of {path} with digest {want[:12]} was kept")
        elif exact:
            swap.restore(store.folder / source, full)
        else:
            swap.put(store.folder / source, full)
    swap.sweep(full)
    swap.drop_bytecode(full)
    for name, place in bytecode.items():
        compiled = inside(store.root, name)
        swap.make_folder(compiled.parent)
        swap.restore(store.folder / place, compiled)


def _mismatches(store: Store, goals: Iterable[tuple[str, str | None]]) -> list[str]:
    return [path for path, goal in goals if digest_of_file(inside(store.root, path)) != goal]


def _drop(store: Store, folders: list[str]) -> None:
    for folder in folders:
        full = inside(store.root, folder)
        with contextlib.suppress(OSError):
            full.rmdir()
            fsync_folder(full.parent)


def _undo(store: Store, journal: dict[str, Any]) -> list[str]:
    """Put every file back; gives the paths where that failed, each with the reason."""
    problems = []
    for move in reversed(journal["moves"]):
        path = move["path"]
        full = inside(store.root, path)
        try:
            if digest_of_file(full) not in (move["from"], move["to"]):
                problems.append(f"{path}: somebody else changed it meanwhile")
                continue
            if move["from"] is not None:
                _make_parents(store, full.parent)
            _settle(store, path, move["from"], f"undo/files/{path}", exact=True, bytecode=move["undo_bytecode"])
        except (OSError, Refusal) as e:
            problems.append(f"{path}: {e}")
    _drop(store, list(reversed(journal["make"])))
    wrong = _mismatches(store, ((m["path"], m["from"]) for m in journal["moves"]))
    return problems or [f"{path}: not as it was" for path in wrong]


def _make_parents(store: Store, folder: Path) -> None:
    if not folder.is_dir() and folder != store.root:
        _make_parents(store, folder.parent)
        swap.make_folder(folder)


def _give_up(store: Store, journal: dict[str, Any], cause: BaseException) -> None:
    _undo_or_refuse(store, journal, str(cause))
    # A full disk may be the very cause: then the history stays as it is, and the tree is as it was all the same.
    with contextlib.suppress(OSError):
        store.append(_failure(journal, "failed", str(cause)))
    store.clear_journal()
    event = journal["event"]
    if isinstance(cause, Refusal) and cause.kind == "conflict":
        raise Refusal(
            "conflict",
            f"{cause.what}; everything was put back",
            next_step="ddtree-overlay diff {target}",
        ) from cause
    raise Refusal(
        "rolled-back",
        f"the {event['event']} of {event['id']} failed half-way and everything was put back",
        why=f"{type(cause).__name__}: {cause}",
        next_step="ddtree-overlay doctor {target}",
    ) from cause


def _undo_or_refuse(store: Store, journal: dict[str, Any], cause: str) -> None:
    problems = _undo(store, journal)
    if not problems:
        return
    lines = [
        f"cp -p {store.folder}/undo/files/{m['path']} {store.root}/{m['path']}" for m in journal["moves"] if m["from"]
    ]
    lines += [f"rm {store.root}/{m['path']}" for m in journal["moves"] if not m["from"]]
    broken = {p.partition(":")[0] for p in problems}
    manual = [line for line in lines if any(line.endswith(f"/{b}") for b in broken)]
    raise Refusal(
        "incomplete",
        f"the {journal['event']['event']} of {journal['event']['id']} could not be put back completely",
        why="; ".join([cause, *problems]),
        next_step="on the host: " + "; ".join([*manual, f"rm {store.folder}/journal.json"]),
    )
