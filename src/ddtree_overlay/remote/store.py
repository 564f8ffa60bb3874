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
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .common import Refusal
from .damage import NAME, event_fault, journal_fault, marked, record_fault, unrecorded


Record = dict[str, Any]


@dataclass(frozen=True)
class Store:
    """The state folder at `folder` for the package at `root`; it need not exist for reading."""

    folder: Path
    root: Path

    # History ---------------------------------------------------------------------------------------------------

    def events(self) -> list[Record]:
        """Every event, the oldest first. A last line without a line feed was torn by a crash and never happened.

        Raises:
            Refusal: A line is damaged.
        """
        path = self.folder / "history.jsonl"
        try:
            lines = path.read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return []
        found = []
        for number, line in enumerate(lines, 1):
            if line:
                value, fault = _parsed(line, event_fault)
                if fault:
                    raise _damaged(f"{path}:{number}", fault, f"sed -i.bak {number}d {shlex.quote(str(path))}")
                found.append(value)
        return found

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
        record: Record
        try:
            record, fault = _parsed(path.read_bytes(), lambda v: record_fault(v, name))
        except OSError as e:
            record, fault = {}, e.strerror or str(e)
        if fault:
            raise Refusal(
                "failed",
                f"the record of {name} is damaged: {path}",
                why=f"{fault}; what the files were before cannot be known without it",
                next_step=(
                    f"put {path} back from a backup; or reinstall SGLang on the host, "
                    f"and then on the host: mv {shlex.quote(str(self.folder))} {shlex.quote(str(self.folder))}.damaged"
                ),
            )
        return record

    def deployments(self) -> list[str]:
        """The ids that have a folder. What else lies there is not ours."""
        try:
            return [n for n in os.listdir(self.folder / "deployments") if NAME.match(n)]
        except FileNotFoundError:
            return []

    def new_deployment(self) -> str:
        """Create the folder of a new deployment and give its id; an id is never used twice."""
        used = [e["id"] for e in self.events()] + self.deployments()
        name = f"d-{max([int(u[2:]) for u in used], default=0) + 1:04d}"
        self.deployment(name).mkdir(parents=True)
        return name

    def tidy(self) -> None:
        """Remove what a push that was refused or killed before its journal has left; the caller holds the lock.

        Nothing is removed while files of a deployment are in the tree that the history does not know: its backups are
        then the only way back. Folders that are not ours stay as well.
        """
        if not self.folder.is_dir():
            return
        try:
            if self.journal() is not None or unrecorded(self):
                return
            known = {e["id"] for e in self.events()}
            if not known and marked(self):
                return
        except Refusal:
            # Damaged state is evidence; whoever came here is told about it by the operation itself.
            return
        for name in self.deployments():
            if name not in known and self.deployment(name).is_dir() and not self.deployment(name).is_symlink():
                shutil.rmtree(self.deployment(name))
        with contextlib.suppress(OSError):
            (self.folder / "deployments").rmdir()
        if not known and not (self.folder / "deployments").exists():
            self.purge()

    # Journal ---------------------------------------------------------------------------------------------------

    def journal(self) -> Record | None:
        """The unfinished transaction, or None.

        Raises:
            Refusal: It is damaged.
        """
        path = self.folder / "journal.json"
        journal: Record
        try:
            journal, fault = _parsed(path.read_bytes(), journal_fault)
        except FileNotFoundError:
            return None
        if fault:
            name = shlex.quote(str(path))
            raise _damaged(str(path), fault, f"mv {name} {name}.damaged")
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
            holder: Record = {"pid": 0, "operator": "", "doing": "an operation", "since": time.time()}
            with contextlib.suppress(ValueError, TypeError):
                holder.update(json.loads(os.pread(fd, 4096, 0)))
            return holder
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


def _parsed(data: bytes, fault_of: Callable[[Any], str]) -> tuple[Any, str]:
    """The JSON value in `data`, and what is wrong with it."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as e:
        return None, f"it is not JSON: {e}"
    return value, fault_of(value)


def _damaged(where: str, fault: str, step: str) -> Refusal:
    return Refusal(
        "failed",
        f"the state on the host is damaged: {where}",
        why=f"{fault}; nothing was changed",
        next_step=f"on the host: {step}; then ddtree-overlay status {{target}}",
    )


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
