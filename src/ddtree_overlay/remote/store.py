# SPDX-License-Identifier: Apache-2.0
"""The state folder: lock, journal, history and the records of deployments.

.ddtree-overlay/
    lock                          flock; its text names the holder
    journal.json                  exists while files are being swapped, and after a crash in the middle of it
    undo/                         what the journal needs to put everything back
    history.jsonl                 one event a line, only ever appended to; a line is the commit of its transaction
    deployments/d-0001/
        manifest.json             what was pushed, and for each file what was there before the overlay
        base/…  bytecode/…        those files themselves
        after/…                   the files of the overlay
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .common import Refusal


Record = dict[str, Any]


@dataclass(frozen=True)
class Store:
    """The state folder at `folder` for the package at `root`; it need not exist for reading."""

    folder: Path
    root: Path

    # History ---------------------------------------------------------------------------------------------------

    def events(self) -> list[Record]:
        """Every event, the oldest first. A last line without a line feed was torn by a crash and never happened."""
        try:
            lines = (self.folder / "history.jsonl").read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines if line]

    def append(self, event: Record) -> None:
        """Add one event, durably. This is the moment in which a transaction counts as done."""
        path = self.folder / "history.jsonl"
        with open(path, "ab+") as stream:
            stream.seek(0)
            whole = stream.read().rpartition(b"\n")
            stream.truncate(len(whole[0]) + len(whole[1]))
            stream.write(json.dumps(event, sort_keys=True).encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
        fsync_folder(self.folder)

    def current(self) -> Record | None:
        """The record of the deployment that is live, or None."""
        events = self.events()
        live = events[-1].get("current") if events else None
        return self.record(live) if live else None

    # Deployments -----------------------------------------------------------------------------------------------

    def deployment(self, name: str) -> Path:
        """The folder of a deployment."""
        return self.folder / "deployments" / name

    def record(self, name: str) -> Record:
        """The record of a deployment.

        Raises:
            Refusal: It is missing or damaged.
        """
        path = self.deployment(name) / "manifest.json"
        try:
            record: Record = json.loads(path.read_bytes())
        except (OSError, ValueError) as e:
            raise Refusal(
                "failed",
                f"the record of {name} cannot be read: {path}",
                why=str(e),
                next_step="ddtree-overlay history {target}",
            ) from e
        return record

    def new_deployment(self) -> str:
        """Create the folder of a new deployment and give its id; an id is never used twice."""
        used = [e["id"] for e in self.events()]
        with contextlib.suppress(FileNotFoundError):
            used += os.listdir(self.folder / "deployments")
        name = f"d-{max([int(u[2:]) for u in used if u.startswith('d-')], default=0) + 1:04d}"
        self.deployment(name).mkdir(parents=True)
        return name

    def tidy(self) -> None:
        """Remove what a push that was refused or killed before its journal has left; the caller holds the lock."""
        if not self.folder.is_dir() or self.journal() is not None:
            return
        events = self.events()
        if not events:
            self.purge()
            return
        known = {e["id"] for e in events}
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self.folder / "deployments"):
                if name not in known:
                    shutil.rmtree(self.deployment(name))

    # Journal ---------------------------------------------------------------------------------------------------

    def journal(self) -> Record | None:
        """The unfinished transaction, or None."""
        try:
            journal: Record = json.loads((self.folder / "journal.json").read_bytes())
        except FileNotFoundError:
            return None
        return journal

    def clear_journal(self) -> None:
        """Forget the transaction: it is committed or undone."""
        with contextlib.suppress(FileNotFoundError):
            (self.folder / "journal.json").unlink()
        fsync_folder(self.folder)
        shutil.rmtree(self.folder / "undo", ignore_errors=True)

    def write(self, path: Path, value: Record) -> None:
        """Write `value` as JSON to `path`, whole or not at all, and durably."""
        write_durably(path, (json.dumps(value, sort_keys=True, indent=1) + "\n").encode())

    # Lock ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def locked(self, operator: str, doing: str, wait: float) -> Iterator[None]:
        """Hold the lock. The kernel drops it when this process ends, however it ends, so none can be left behind.

        Raises:
            Refusal: Somebody else holds it, and still does after `wait` seconds.
        """
        fd = self._acquire(time.monotonic() + wait)
        try:
            holder = {"pid": os.getpid(), "operator": operator, "doing": doing, "since": time.time()}
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps(holder).encode(), 0)
            yield
        finally:
            os.close(fd)

    def _acquire(self, deadline: float) -> int:
        path = self.folder / "lock"
        while True:
            fd = self._open_lock(path)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                if time.monotonic() >= deadline:
                    raise self._held() from None
                time.sleep(0.1)
                continue
            # The file may have been removed while we waited for it: then this lock protects nothing.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.stat(path)):
                    return fd
            os.close(fd)

    def _open_lock(self, path: Path) -> int:
        # A purge by somebody else may remove the folder at any time before the lock is ours.
        for _ in range(100):
            with contextlib.suppress(FileNotFoundError, FileExistsError):
                self.folder.mkdir(exist_ok=True)
                return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            time.sleep(0.01)
        raise Refusal("failed", f"{self.folder} cannot be made or used", next_step=f"look at {self.folder} on the host")

    def holder(self) -> Record | None:
        """Who holds the lock right now, or None."""
        try:
            fd = os.open(self.folder / "lock", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            with contextlib.suppress(ValueError):
                holder: Record = json.loads(os.pread(fd, 4096, 0))
                return holder
            return {"pid": 0, "operator": "", "doing": "an operation", "since": time.time()}
        finally:
            os.close(fd)
        return None

    def _held(self) -> Refusal:
        holder = self.holder() or {}
        who = f"{holder.get('operator') or 'somebody'} (pid {holder.get('pid', '?')})"
        since = time.strftime("%H:%M:%S", time.gmtime(holder.get("since", time.time())))
        return Refusal(
            "locked",
            f"{who} has been running a {holder.get('doing', 'deployment')} here since {since} UTC",
            next_step="wait for it, or try again with --lock-wait SECONDS",
        )

    def purge(self) -> None:
        """Remove the whole state folder; the caller holds the lock. The lock file goes last."""
        for name in sorted(os.listdir(self.folder), key=lambda n: n == "lock"):
            path = self.folder / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        # Somebody who waited for the lock may have made a new one already; the folder is theirs to remove then.
        with contextlib.suppress(OSError):
            self.folder.rmdir()
        fsync_folder(self.folder.parent)


def fsync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


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
