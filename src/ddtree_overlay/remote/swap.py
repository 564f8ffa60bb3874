# SPDX-License-Identifier: Apache-2.0
"""One file replaced or removed, the right way: a new inode with the old attributes, and no stale bytecode."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import stat
from pathlib import Path

from .durable import fsync_folder


def temp_of(path: Path) -> Path:
    """The temporary sibling of `path`: hidden and without `.py` at its end, so that nothing ever imports it."""
    return path.with_name(f".{path.name}.ddtree-tmp")


def put(source: Path, path: Path) -> None:
    """Replace `path` by a copy of `source` that keeps the mode, owner and extended attributes of `path`.

    A new file gets the attributes that its neighbours suggest. `path` is never written through: a package manager may
    have hard-linked it to its cache.
    """
    temp = _fresh(temp_of(path))
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as stream:
        stream.write(source.read_bytes())
        if path.exists():
            _copy_attributes(path, temp)
        else:
            _adopt(temp, 0o644, path.parent)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temp, path)
    fsync_folder(path.parent)


def restore(backup: Path, path: Path, *, spent: bool = False) -> None:
    """Put an exact copy of `backup` at `path`: bytes, mode, owner, extended attributes and times.

    With `spent` nobody needs the backup afterwards: on a full disk, which has no room for a copy, it is given away.
    """
    temp = _fresh(temp_of(path))
    try:
        keep(backup, temp)
    except OSError as e:
        _fresh(temp)
        if not spent or e.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        # A second name of an inode that is there already needs no space.
        os.link(backup, temp)
    os.replace(temp, path)
    fsync_folder(path.parent)


def keep(path: Path, backup: Path) -> None:
    """Keep an exact copy of `path` as the new file `backup`.

    A second name of the same inode would be cheaper, but whoever edits another name of it in place, in a package cache
    or in a second environment, would spoil the backup with it.
    """
    fd = os.open(backup, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as stream:
        stream.write(path.read_bytes())
        stream.flush()
        _copy_attributes(path, backup)
        st = path.stat()
        os.utime(backup, ns=(st.st_atime_ns, st.st_mtime_ns))
        os.fsync(stream.fileno())


def remove(path: Path) -> None:
    """Remove `path` if it is there."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        path.unlink()
        fsync_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Create `folder` with the mode and owner of the folder it lies in."""
    if not folder.is_dir():
        folder.mkdir()
        _adopt(folder, 0o755, folder.parent)
        fsync_folder(folder)
        fsync_folder(folder.parent)


def sweep(path: Path) -> None:
    """Remove a temporary sibling that a killed run left behind; a folder of that name is none of ours."""
    temp = temp_of(path)
    if temp.is_symlink() or not temp.is_dir():
        remove(temp)


def bytecode_of(path: Path) -> list[Path]:
    """Every compiled file of the module at `path`.

    Of each Python version and optimisation level, and also in this interpreter's `sys.pycache_prefix` if it has one.

    Python trusts a compiled file whose recorded size and whole second of change match, or, if it is marked as
    unchecked, always. So the compiled files of a replaced module must go.
    """
    if path.suffix != ".py":
        return []
    folders = {path.parent / "__pycache__"}
    with contextlib.suppress(NotImplementedError):
        folders.add(Path(importlib.util.cache_from_source(str(path))).parent)
    return sorted(p for f in folders if f.is_dir() for p in f.glob(f"{_escaped(path.stem)}.*.pyc"))


def _escaped(stem: str) -> str:
    import glob

    return glob.escape(stem)


def drop_bytecode(path: Path) -> None:
    """Remove every compiled file of the module at `path`."""
    for compiled in bytecode_of(path):
        remove(compiled)


def _fresh(temp: Path) -> Path:
    # Whatever lies at this name, a symbolic link included, is taken away rather than followed.
    with contextlib.suppress(FileNotFoundError):
        temp.unlink()
    return temp


def _copy_attributes(source: Path, target: Path) -> None:
    st = source.stat()
    # Owner first: changing it clears set-id bits of the mode.
    if (st.st_uid, st.st_gid) != _owner(target):
        os.chown(target, st.st_uid, st.st_gid)
    os.chmod(target, stat.S_IMODE(st.st_mode))
    for name in _xattrs(source):
        try:
            os.setxattr(target, name, os.getxattr(source, name))
        except OSError as e:
            # Security labels may be set by the kernel alone; a user attribute must not get lost.
            if name.startswith("user.") or e.errno not in (errno.EPERM, errno.EACCES, errno.ENOTSUP):
                raise


def _xattrs(path: Path) -> list[str]:
    try:
        return os.listxattr(path)
    except (OSError, AttributeError):
        return []


def _owner(path: Path) -> tuple[int, int]:
    st = path.stat()
    return st.st_uid, st.st_gid


def _adopt(path: Path, mode: int, parent: Path) -> None:
    st = parent.stat()
    if os.geteuid() == 0 and (st.st_uid, st.st_gid) != _owner(path):
        os.chown(path, st.st_uid, st.st_gid)
    # A package that others may not read stays so.
    os.chmod(path, mode & (stat.S_IMODE(st.st_mode) | 0o600))
