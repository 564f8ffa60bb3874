# SPDX-License-Identifier: Apache-2.0
"""Names and bytes that are still there after a power cut."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def fsync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_tree(folder: Path) -> None:
    """Make every name in and below `folder` durable, and that of `folder` itself."""
    if folder.is_dir():
        for current, _, _ in os.walk(folder):
            fsync_folder(Path(current))
        fsync_folder(folder.parent)


def write_durably(path: Path, data: bytes) -> None:
    """Write `path`, whole or not at all: temporary sibling, fsync, rename, fsync of the folder."""
    temp = path.with_name(f".{path.name}.tmp")
    with contextlib.suppress(FileNotFoundError):
        temp.unlink()
    with open(temp, "xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temp, path)
    fsync_folder(path.parent)


def append_line(path: Path, line: bytes) -> None:
    """Add `line` to the end of `path`, durably. A torn line at its end, from a crash, is taken away first.

    When the new line cannot be made durable, as on a full disk, it is taken back: it must not count later.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    with os.fdopen(fd, "rb+") as stream:
        data = stream.read()
        whole = data.rfind(b"\n") + 1
        try:
            stream.truncate(whole)
            stream.seek(whole)
            stream.write(line + b"\n")
            stream.flush()
            os.fsync(fd)
        except BaseException:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, whole)
            raise
    fsync_folder(path.parent)
