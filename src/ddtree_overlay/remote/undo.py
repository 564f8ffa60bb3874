# SPDX-License-Identifier: Apache-2.0
"""The way back from the middle of a transaction, and what to say when it cannot be gone to its end."""

from __future__ import annotations

import contextlib
import errno
import shlex
from pathlib import Path
from typing import Any

from . import swap
from .common import Refusal, digest_of_file, inside
from .durable import fsync_folder
from .store import Store


Move = dict[str, Any]
#: A file that is not as it was before, and why: package-relative path, reason.
Problem = tuple[str, str]

#: Reasons not to remove a folder that are none of ours: somebody uses it, or it is gone.
_IN_USE = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR, errno.EBUSY)


def put_back(store: Store, moves: list[Move], make: list[str], *, replaced: bool = False) -> list[Problem]:
    """Give every file of `moves` its earlier state, and take the folders of `make` away again.

    Running it again finishes what an earlier run began.

    Args:
        store: The state folder, with the copies of the files in undo/.
        moves: What was, or may have been, carried out.
        make: Folders that were made for it, outermost first.
        replaced: The package was reinstalled in between: what is neither the old file nor the new one is none of ours.

    Returns:
        The files for which that failed.
    """
    problems = []
    for move in reversed(moves):
        reason = _one_back(store, move, replaced=replaced)
        if reason:
            problems.append((move["path"], reason))
    # What imported a new module meanwhile has left a folder of compiled files in it.
    drop_folders(store, [f for made in reversed(make) for f in (f"{made}/__pycache__", made)])
    failed = {path for path, _ in problems}
    rest = [m for m in moves if m["path"] not in failed and _differs(store, m, replaced=replaced)]
    return [*problems, *((m["path"], "not as it was") for m in rest)]


def _one_back(store: Store, move: Move, *, replaced: bool) -> str:
    path = move["path"]
    full = inside(store.root, path)
    try:
        if digest_of_file(full) not in (move["from"], move["to"]):
            return "" if replaced or reinstalled(store, move) else "somebody else changed it meanwhile"
        if move["from"] is not None:
            _make_parents(store, full.parent)
        place = f"undo/files/{path}"
        settle(store, path, move["from"], place, exact=True, bytecode=move["undo_bytecode"], spent=True)
    except Refusal as e:
        return e.what
    except OSError as e:
        return str(e)
    for compiled in {*move["bytecode"], *move["undo_bytecode"]}:
        # A left-over is no file that is not as it was: the next contact sweeps it.
        with contextlib.suppress(OSError):
            swap.sweep(inside(store.root, compiled))
    return ""


def _differs(store: Store, move: Move, *, replaced: bool) -> bool:
    now = state_of(inside(store.root, move["path"]))
    if replaced or reinstalled(store, move):
        return bool(now == move["to"])
    return bool(now != move["from"])


def reinstalled(store: Store, move: Move) -> bool:
    """Whether the file is as before any overlay, because the same release was installed again in between."""
    base = move.get("base")
    return base is not None and base != move["to"] and state_of(inside(store.root, move["path"])) == base


def state_of(path: Path) -> str | None:
    """Digest of a file, None where there is none, and what else it is in words."""
    try:
        return digest_of_file(path)
    except Refusal:
        return "not a regular file"
    except OSError as e:
        return e.strerror or "unreadable"


def settle(
    store: Store,
    path: str,
    want: str | None,
    source: str | None,
    *,
    exact: bool,
    bytecode: dict[str, str],
    spent: bool = False,
) -> None:
    """Bring one file to the digest `want`, and its compiled files to those in `bytecode`; `spent` as in `restore`."""
    full = inside(store.root, path)
    if digest_of_file(full) != want:
        if want is None:
            swap.remove(full)
        elif source is None:
            raise Refusal("failed", f"no copy of {path} with digest {want[:12]} was kept")
        elif exact:
            swap.restore(store.folder / source, full, spent=spent)
        else:
            swap.put(store.folder / source, full)
    swap.sweep(full)
    swap.drop_bytecode(full)
    for name, place in bytecode.items():
        compiled = inside(store.root, name)
        swap.make_folder(compiled.parent)
        swap.restore(store.folder / place, compiled, spent=spent)


def drop_folders(store: Store, folders: list[str]) -> None:
    """Remove those of `folders`, innermost first, that are there and empty."""
    for folder in folders:
        full = inside(store.root, folder)
        try:
            full.rmdir()
        except OSError as e:
            if e.errno not in _IN_USE:
                raise
        else:
            fsync_folder(full.parent)


def _make_parents(store: Store, folder: Path) -> None:
    if not folder.is_dir() and folder != store.root:
        _make_parents(store, folder.parent)
        swap.make_folder(folder)


def refuse(store: Store, journal: dict[str, Any], problems: list[Problem], cause: str) -> Refusal:
    """The refusal that names what is not as it was, with the lines that put it right by hand."""
    event = journal["event"]
    moves = {m["path"]: m for m in journal["moves"]}
    lines = [line for path, _ in problems for line in _by_hand(store, moves[path])]
    return Refusal(
        "incomplete",
        f"the {event['event']} of {event['id']} could not be put back completely",
        why="; ".join([cause, *(f"{path}: {reason}" for path, reason in problems)]),
        next_step="\n".join(["# on the host:", *lines, f"rm -f {_quoted(store.folder / 'journal.json')}"]),
    )


def _by_hand(store: Store, move: Move) -> list[str]:
    """Shell lines that do for one file what `put_back` does; like it they write through no link."""
    full = inside(store.root, move["path"])
    temp = swap.temp_of(full)
    lines = []
    if state_of(full) == "not a regular file":
        lines.append(f"mv -T {_quoted(full)} {_quoted(full.with_name(full.name + '.in-the-way'))}")
    if move["from"] is None:
        lines.append(f"rm -f {_quoted(full)}")
    else:
        kept = store.folder / f"undo/files/{move['path']}"
        lines.append(f"mkdir -p {_quoted(full.parent)}")
        lines.append(f"cp -a --remove-destination {_quoted(kept)} {_quoted(temp)}")
        lines.append(f"mv -fT {_quoted(temp)} {_quoted(full)}")
    if full.suffix == ".py":
        lines.append(f"rm -f {_quoted(full.parent / '__pycache__')}/{shlex.quote(full.stem)}.*.pyc")
    return lines


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
