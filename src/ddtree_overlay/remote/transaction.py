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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import ages, swap
from .common import Refusal, digest_of_file, inside
from .damage import checksum
from .durable import fsync_folder, sync_tree
from .store import Store
from .undo import Move, drop_folders, put_back, refuse, settle, state_of


@contextlib.contextmanager
def session(store: Store, operator: str, doing: str, wait: float, *, version: str | None = None) -> Iterator[str]:
    """Hold the lock of the host with whatever an earlier run left unfinished put right, and tidy up at the end.

    Args:
        store: The state folder.
        operator: Who asks, for others to see.
        doing: What for.
        wait: Seconds to wait for the lock.
        version: The SGLang that is installed now, or None when it was uninstalled.

    Yields:
        A sentence about what was put right, or "".
    """
    note = ""
    while True:
        with store.locked(operator, doing, wait) as protected:
            if store.purging():
                # The lock goes with the rest, so take it anew afterwards.
                store.purge()
                note = "removing backups and history had been interrupted, and was finished first"
                continue
            try:
                note = recover(store, version) or note
                yield note
            except Refusal as refusal:
                if note and note not in refusal.why:
                    refusal.why = "; ".join(filter(None, [refusal.why, note]))
                raise
            finally:
                # After a purge the folder may be somebody else's already.
                if protected():
                    store.tidy()
            return


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
    event = {**event, "txn": store.next_txn(), **_stamp()}
    _prepare(store, moves, event)
    caches = {str(Path(name).parent) for move in moves for name in move["bytecode"]}
    make = [*make, *sorted(c for c in caches if not inside(store.root, c).is_dir())]
    journal = {"txn": event["txn"], "event": event, "moves": moves, "make": make, "drop": drop, "pid": os.getpid()}
    journal["version"] = store.version_of(event["id"])
    store.write(store.folder / "journal.json", {**journal, "checksum": checksum(journal)})
    begun: list[Move] = []
    try:
        _apply(store, journal, begun)
        store.append(event)
    except BaseException as cause:
        if not _committed(store, event):
            _give_up(store, journal, begun, cause)
    # The line is in the history: it is done. As long as the journal is there, the next contact tries the rest again.
    with contextlib.suppress(OSError):
        _finish(store, journal)


def recover(store: Store, version: str | None = None) -> str:
    """Finish what an interrupted run began; the caller holds the lock.

    Returns:
        A sentence about what was done, or "" when there was nothing to do.

    Raises:
        Refusal: `incomplete`, when something could not be put back.
    """
    journal = store.journal()
    if journal is None:
        return ""
    what = f"{journal['event']['event']} of {journal['event']['id']}"
    ended = next((e for e in store.events() if e["txn"] == journal["txn"]), None)
    if ended is not None and ended["event"] == journal["event"]["event"]:
        # An empty folder that still cannot be removed must not stand in the way of everything that comes after.
        with contextlib.suppress(OSError):
            drop_folders(store, journal["drop"])
        store.clear_journal()
        return f"tidied up after the {what}, which was complete"
    if ended is None:
        replaced = "version" in journal and journal["version"] != version
        problems = put_back(store, journal["moves"], journal["make"], replaced=replaced)
        if problems:
            raise refuse(store, journal, problems, "it was interrupted")
        # A full disk may be the very cause: the files are back all the same.
        with contextlib.suppress(OSError):
            store.append(_failure(journal, "recovered", "interrupted; put back at the next contact"))
    store.clear_journal()
    return f"the interrupted {what} was put back first"


def _failure(journal: dict[str, Any], kind: str, note: str) -> dict[str, Any]:
    event = journal["event"]
    begun = {k: event[k] for k in ("time", "boot", "up") if k in event}
    changed = {"event": kind, "of": event["event"], "current": event["before"], "note": note, "begun": begun}
    return {**event, **changed, **_stamp()}


def _stamp() -> dict[str, Any]:
    return {"time": time.time(), **ages.now()}


def _prepare(store: Store, moves: list[Move], event: dict[str, Any]) -> None:
    store.clear_journal()
    for move in moves:
        full = inside(store.root, move["path"])
        if move["from"] is not None:
            keep_in(store, f"undo/files/{move['path']}", full)
        move["undo_bytecode"] = keep_bytecode(store, "undo/bytecode", full)
    sync_tree(store.folder / "undo")
    sync_tree(store.deployment(event["id"]))
    fsync_folder(store.folder)


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


def _apply(store: Store, journal: dict[str, Any], begun: list[Move]) -> None:
    """Carry out the moves; `begun` gets each before it is touched."""
    for folder in journal["make"]:
        swap.make_folder(inside(store.root, folder))
    for move in journal["moves"]:
        now = digest_of_file(inside(store.root, move["path"]))
        if now != move["from"]:
            raise Refusal("conflict", f"{move['path']} changed during the swap")
        begun.append(move)
        settle(store, move["path"], move["to"], move["source"], exact=move["exact"], bytecode=move["bytecode"])
    wrong = [m["path"] for m in begun if state_of(inside(store.root, m["path"])) != m["to"]]
    if wrong:
        raise Refusal("failed", f"after the swap these files are not as planned: {', '.join(wrong)}")


def _finish(store: Store, journal: dict[str, Any]) -> None:
    """What is left to do once the line is in the history."""
    drop_folders(store, journal["drop"])
    store.clear_journal()


def _committed(store: Store, event: dict[str, Any]) -> bool:
    """Whether the line is in the history all the same: a disk that fails may refuse to take it back."""
    with contextlib.suppress(OSError, Refusal):
        return event in store.events()
    return False


def _give_up(store: Store, journal: dict[str, Any], begun: list[Move], cause: BaseException) -> None:
    problems = put_back(store, begun, journal["make"])
    if problems:
        raise refuse(store, journal, problems, str(cause)) from cause
    # A full disk may be the very cause: then the history stays as it is, and the tree is as it was all the same.
    with contextlib.suppress(OSError):
        store.append(_failure(journal, "failed", str(cause)))
    with contextlib.suppress(OSError):
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
