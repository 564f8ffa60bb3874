# SPDX-License-Identifier: Apache-2.0
"""Reasons why a write would fail, each found and named before anything is written."""

from __future__ import annotations

import fcntl
import os
import shlex
import stat
import struct
from collections.abc import Iterable
from pathlib import Path

from .common import Refusal, inside, owner_of
from .facts import disk, mounts
from .locate import Site
from .swap import bytecode_of, temp_of


#: FS_IOC_GETFLAGS and the flags that `chattr +i` and `chattr +a` set.
_GET_FLAGS, _IMMUTABLE, _APPEND_ONLY = 0x80086601, 0x10, 0x20
#: Room for the journal, the records and directory blocks.
_SLACK_BYTES, _SLACK_INODES = 256 * 1024, 32


def blockers(site: Site, paths: Iterable[str], need: int) -> list[Refusal]:
    """Everything that keeps a push or rollback from writing `paths`.

    Args:
        site: The installed package.
        paths: Package-relative files that will be replaced, added or removed.
        need: Bytes that will be written, staged copies included.
    """
    paths = list(paths)
    if not paths:
        return []
    state = site.state if site.state.is_dir() else site.root.parent
    fulls = [inside(site.root, p) for p in paths]
    folders = sorted({state, *(_existing(p.parent) for f in fulls for p in (f, *bytecode_of(f)))})
    found = [r for folder in folders for r in [_folder(folder)] if r]
    points = {point for point, _ in mounts()}
    for path in paths:
        refusal = _file(site, path, points)
        if refusal:
            found.append(refusal)
    # What is staged and kept lies beside the package, which may be a mount of its own.
    places = {folder.stat().st_dev: folder for folder in reversed(folders)}
    return found or [r for place in places.values() for r in _space(place, need, len(paths))]


def keepers(folder: Path) -> list[Refusal]:
    """Everything that keeps this user from removing the state folder `folder` with all that is in it."""
    inner = [Path(current) for current, _, _ in os.walk(folder)]
    return [r for place in [folder.parent, *inner] if place.is_dir() for r in [_folder(place)] if r]


def _existing(folder: Path) -> Path:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def _folder(folder: Path) -> Refusal | None:
    if disk(folder)["read_only"]:
        return Refusal(
            "failed",
            f"the install is read-only: {folder} lies on a file system that is mounted read-only",
            next_step="remount it read-write, or build the overlay into the image it comes from",
        )
    # The kernel calls such a folder not writable, which is only half of the truth.
    locked = _unlocked(folder, str(folder))
    if locked or os.access(folder, os.W_OK | os.X_OK):
        return locked
    st = folder.stat()
    return Refusal(
        "failed",
        f"no permission to write in {folder}",
        why=f"it belongs to {owner_of(st)} with mode {stat.S_IMODE(st.st_mode):04o}, and this is uid {os.geteuid()}",
        next_step="set `user` in deploy.toml to the owner of the install",
    )


def _file(site: Site, path: str, points: set[str]) -> Refusal | None:
    full = inside(site.root, path)
    linked = next((p for p in (full, *full.parents) if site.root in p.parents and p.is_symlink()), None)
    if linked:
        return Refusal(
            "failed",
            f"{path} is reached through a symbolic link: {linked} -> {os.readlink(linked)}",
            why="replacing it would change or detach a file that other installs may share",
            next_step="install SGLang with copied files (uv: --link-mode copy), then ddtree-overlay snapshot {target}",
        )
    occupied = _temporary(full, path)
    if occupied or not full.exists():
        return occupied
    if not full.is_file():
        return Refusal("failed", f"{path} is not a regular file", next_step=f"look at {full} on the host")
    if str(full) in points:
        return Refusal(
            "failed",
            f"{path} is bind-mounted: {full} is a mount point of its own and cannot be replaced (EBUSY)",
            next_step=f"change the file at its source, or unmount {full} and try again",
        )
    return _attributes(full, path)


def _temporary(full: Path, path: str) -> Refusal | None:
    for temp in map(temp_of, (full, *bytecode_of(full))):
        if temp.is_dir():
            return Refusal(
                "failed",
                f"a folder lies at the name that the new {path} has until it is complete: {temp}",
                why="it was not made by this tool, so it is not removed",
                next_step=f"ls -la {shlex.quote(str(temp))}  # on the host; then move it somewhere else",
            )
        locked = _unlocked(temp, str(temp)) if temp.is_file() else None
        if locked:
            return locked
    return None


def _attributes(full: Path, path: str) -> Refusal | None:
    locked = [(full, path), *((c, str(c)) for c in bytecode_of(full))]
    for refusal in (_unlocked(file, name) for file, name in locked):
        if refusal:
            return refusal
    st = full.stat()
    if os.geteuid() not in (0, st.st_uid):
        return Refusal(
            "failed",
            f"{path} belongs to {owner_of(st)}; replacing it as uid {os.geteuid()} would change its owner",
            next_step="set `user` in deploy.toml to the owner of the install",
        )
    return None


def _unlocked(path: Path, name: str) -> Refusal | None:
    flags = _flags(path)
    if not flags & (_IMMUTABLE | _APPEND_ONLY):
        return None
    kind = "immutable" if flags & _IMMUTABLE else "append-only"
    return Refusal(
        "failed",
        f"{name} is {kind} (chattr)",
        next_step=f"chattr -i -a {shlex.quote(str(path))}  # on the host; then try again",
    )


def _flags(path: Path) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return 0
    try:
        return int(struct.unpack("l", fcntl.ioctl(fd, _GET_FLAGS, struct.pack("l", 0)))[0])
    except OSError:
        # The file system keeps no such flags.
        return 0
    finally:
        os.close(fd)


def _space(folder: Path, need: int, files: int) -> list[Refusal]:
    free = disk(folder)
    if free["free"] < need + _SLACK_BYTES:
        return [
            Refusal(
                "failed",
                f"no space left: {folder} has {free['free']} bytes free, {need + _SLACK_BYTES} are needed",
                next_step=f"free some space on the file system of {folder}",
            )
        ]
    # Staged copy, backup, undo copy and the temporary file of each file.
    inodes = 4 * files + _SLACK_INODES
    if free["inodes"] is not None and free["inodes"] < inodes:
        return [
            Refusal(
                "failed",
                f"no inodes left: {folder} has {free['inodes']} free, {inodes} are needed",
                next_step=f"remove unneeded files on the file system of {folder}",
            )
        ]
    return []
