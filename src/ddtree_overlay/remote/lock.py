# SPDX-License-Identifier: Apache-2.0
"""The lock of a host: held by a live process or by nobody, and its holder has a name."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .common import Refusal
from .durable import fsync_folder
from .telling import Waiting, deserted


#: Between two attempts to get the lock.
_PAUSE = 0.05


@contextlib.contextmanager
def held(folder: Path, operator: str, doing: str, wait: float) -> Iterator[Callable[[], bool]]:
    """Hold the lock in `folder`. The kernel drops it when this process ends, however it ends.

    Yields:
        Whether the lock still protects `folder`: not any more once its file was removed.

    Raises:
        Refusal: Somebody else holds it, and still does after `wait` seconds, or whoever asked for it has gone away.
    """
    fd = _acquire(folder, wait)
    try:
        # Without its text from before: a reader would take the last holder for this one.
        os.ftruncate(fd, 0)
        mine = {"pid": os.getpid(), "operator": operator, "doing": doing, "since": time.time()}
        # A full disk must not keep anybody from going back: without its text the lock holds as well.
        with contextlib.suppress(OSError):
            os.pwrite(fd, json.dumps(mine).encode(), 0)
        yield lambda: _protects(fd, folder / "lock")
    finally:
        os.close(fd)


def holder(folder: Path) -> dict[str, Any] | None:
    """Who holds the lock in `folder` right now, or None."""
    try:
        fd = os.open(folder / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return None if _only_readers(fd) else _named(os.pread(fd, 4096, 0))
    finally:
        os.close(fd)


def _named(text: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {"pid": 0, "operator": "", "doing": "deployment", "since": 0.0}
    with contextlib.suppress(ValueError, TypeError):
        found.update(json.loads(text))
    return found


def _only_readers(fd: int) -> bool:
    """Whether nobody changes anything here. Whoever looks holds the lock with others for a moment."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(fd, fcntl.LOCK_UN)
    return True


def _acquire(folder: Path, wait: float) -> int:
    path = folder / "lock"
    waiting = Waiting(time.monotonic())
    waited = False
    while True:
        fd = _open(folder, path)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            try:
                # Somebody who only looks who holds the lock, as `status` does, is gone in a moment.
                if not _only_readers(fd):
                    waited = True
                    by = _named(os.pread(fd, 4096, 0))
                    if waiting.seconds >= wait:
                        raise _refusal(by)
                    waiting.tell(f"waiting: {_holding(by)}")
            finally:
                os.close(fd)
            time.sleep(_PAUSE)
            continue
        except BaseException:
            os.close(fd)
            raise
        # The file may have been removed while we waited for it: then this lock protects nothing.
        if _protects(fd, path):
            # A change that its operator has given up must not happen minutes later (vespa#6474).
            if waited and deserted():
                os.close(fd)
                raise Refusal("locked", "nobody waits for this any more; nothing was changed")
            return fd
        os.close(fd)


def _protects(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _open(folder: Path, path: Path) -> int:
    # A purge by somebody else may remove the folder at any time before the lock is ours.
    for _ in range(100):
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            if not folder.is_dir():
                folder.mkdir(exist_ok=True)
                fsync_folder(folder.parent)
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        time.sleep(0.01)
    raise Refusal("failed", f"{folder} cannot be made or used", next_step=f"look at {folder} on the host")


def _holding(by: dict[str, Any]) -> str:
    who = f"{by['operator'] or 'somebody'} (pid {by['pid'] or 'unknown'})"
    since = time.strftime(" since %H:%M:%S UTC", time.gmtime(by["since"])) if by["since"] else ""
    return f"{who} has been running a {by['doing']} here{since}"


def _refusal(by: dict[str, Any]) -> Refusal:
    return Refusal("locked", _holding(by), next_step="wait for it, or try again with --lock-wait SECONDS")
