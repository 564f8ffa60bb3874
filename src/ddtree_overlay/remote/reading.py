# SPDX-License-Identifier: Apache-2.0
"""Snapshot and file contents: everything that reads and never writes."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from .common import Refusal, digest, digest_of_file, entry, inside, read_file
from .facts import python_facts, versions
from .grounds import refuse_unsettled
from .locate import Site, locate
from .standing import refuse_half, standing
from .store import Store


Answer = tuple[dict[str, Any], bytes]


def snapshot(args: dict[str, Any], _: bytes) -> Answer:
    """Files of the package: those in `wanted` that exist, and every module below srt/ that matches `mention`.

    Contents follow for the files whose digest is not the one in `known`. Every file is hashed before and after, and its
    stamp compared: a file that is rewritten all the time may show the same bytes twice.
    """
    site = locate(args)
    store = Store(site.state, site.root)
    refuse_unsettled(store)
    found = standing(site, store, store.current())
    refuse_half(site, found)
    # Modules of a deployment whose base an installer has replaced are no part of what it installed.
    left = set(found.left)
    mentions = [p for p in _mentions(site.root, args["mention"].encode()) if p not in left]
    present = [p for p in args["wanted"] if p not in left and os.path.lexists(inside(site.root, p))]
    known = args.get("known", {})
    entries, sent, pieces = [], [], []
    paths = sorted({*present, *mentions})
    stamps = {path: _stamp(site.root, path) for path in paths}
    for path in paths:
        one = entry(site.root, path)
        if one is None:
            raise _changed(path)
        entries.append(one)
        if known.get(path) != one["sha256"]:
            data = read_file(inside(site.root, path))
            if digest(data) != one["sha256"]:
                raise _changed(path)
            sent.append({"path": path, "size": len(data)})
            pieces.append(data)
    for one in entries:
        path = one["path"]
        if digest_of_file(inside(site.root, path)) != one["sha256"] or _stamp(site.root, path) != stamps[path]:
            raise _changed(path)
    refuse_unsettled(store)
    result = {**describe(site, args), "files": entries, "mentions": mentions, "sent": sent}
    result["left"] = sorted(left)
    return result, b"".join(pieces)


def describe(site: Site, args: dict[str, Any]) -> dict[str, Any]:
    """What every answer says about the package and its interpreter."""
    from_folder = bool(args.get("root"))
    return {
        "root": str(site.root),
        "seen": str(site.seen),
        "install": site.install,
        "versions": versions(site, from_folder=from_folder),
        # A folder has no interpreter: the one that runs this agent says nothing about it.
        "interpreter": None if from_folder else python_facts(),
        "dflash": any(
            (site.root / "srt/speculative" / n).is_file() for n in ("dflash_worker.py", "dflash_worker_v2.py")
        ),
    }


def _stamp(root: Path, path: str) -> tuple[int, int, int]:
    try:
        st = inside(root, path).stat()
    except FileNotFoundError:
        raise _changed(path) from None
    return st.st_ino, st.st_size, st.st_ctime_ns


def _mentions(root: Path, pattern: bytes) -> list[str]:
    regex = re.compile(pattern)
    found: list[str] = []
    for folder, names, files in os.walk(root / "srt"):
        names[:] = sorted(n for n in names if n != "__pycache__")
        modules = [Path(folder) / name for name in files if name.endswith(".py")]
        # What is no file is no module to Python either: a pipe, or the dangling link that an editor has as its lock.
        modules = [m for m in modules if m.is_file()]
        found += [m.relative_to(root).as_posix() for m in modules if regex.search(read_file(m))]
    return sorted(path for path in found if _nameable(path))


def _nameable(path: str) -> bool:
    """Whether `path` is text; no release and no import statement has a module whose name is not."""
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _changed(path: str) -> Refusal:
    return Refusal(
        "conflict",
        f"{path} changed while it was read",
        why="something is installing or editing SGLang on this host",
        next_step="wait until it is done, then run the same command again",
    )


def fetch(args: dict[str, Any], _: bytes) -> Answer:
    """The contents of each path in `paths`, concatenated; `size` is None for an absent file."""
    site = locate(args)
    refuse_unsettled(Store(site.state, site.root))
    sizes, pieces = [], []
    for path in args["paths"]:
        try:
            data = read_file(inside(site.root, path))
        except FileNotFoundError:
            sizes.append({"path": path, "size": None, "sha256": None})
            continue
        sizes.append({"path": path, "size": len(data), "sha256": digest(data)})
        pieces.append(data)
    return {"files": sizes}, b"".join(pieces)
