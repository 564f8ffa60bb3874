# SPDX-License-Identifier: Apache-2.0
"""The state folder: journal, history and the records of deployments.

.ddtree-overlay/
    lock                          see `lock`
    purging                       exists while all of this is being removed, and after a crash in the middle of it
    journal.json                  exists while files are being swapped, and after a crash in the middle of it
    undo/                         what the journal needs to put everything back
    stage/                        files of a push to several hosts that waits for the others (see `stages`)
    history.jsonl                 one event a line, only ever appended to; a line is the commit of its transaction
    deployments/d-0001/
        manifest.json             what was pushed, and for each file what was there before the overlay
        base/…  bytecode/…        those files themselves
        after/…                   the files of the overlay
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import lock
from .common import Refusal
from .damage import NAME, event_fault, journal_fault, marked, record_fault, unrecorded
from .durable import append_line, fsync_folder, write_durably
from .pruning import PRUNED


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
        append_line(self.folder / "history.jsonl", json.dumps(event, sort_keys=True).encode())

    def next_txn(self) -> int:
        """A number that no event has. A count would do until somebody takes a damaged line out of the history."""
        return max((int(e["txn"]) for e in self.events()), default=-1) + 1

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
                    f"put {path} back from a backup; or reinstall SGLang on the host, and then there:\n"
                    f"mv {shlex.quote(str(self.folder))} {shlex.quote(str(self.folder))}.damaged"
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

    def pruned(self) -> set[str]:
        """The deployments whose backups were removed because newer ones are enough."""
        return {e["id"] for e in self.events() if e["event"] == PRUNED}

    def version_of(self, name: str) -> str | None:
        """The SGLang that the deployment `name` was pushed to."""
        version: str | None = self.record(name)["version"]
        return version

    def previous(self, name: str) -> str | None:
        """The deployment below `name`, or None, also when its record is damaged."""
        with contextlib.suppress(Refusal):
            return self.record(name)["previous"]  # type: ignore[no-any-return]
        return None

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

    def interrupted(self) -> Record | None:
        """The journal of a transaction that was neither committed nor put back, or None."""
        journal = self.journal()
        return None if journal and any(e["txn"] == journal["txn"] for e in self.events()) else journal

    def clear_journal(self) -> None:
        """Forget the transaction: it is committed or undone."""
        with contextlib.suppress(FileNotFoundError):
            (self.folder / "journal.json").unlink()
            fsync_folder(self.folder)
        remove(self.folder / "undo")

    def write(self, path: Path, value: Record) -> None:
        """Write `value` as JSON to `path`, whole or not at all, and durably."""
        write_durably(path, (json.dumps(value, sort_keys=True, indent=1) + "\n").encode())

    # Lock ------------------------------------------------------------------------------------------------------

    def locked(self, operator: str, doing: str, wait: float) -> contextlib.AbstractContextManager[Callable[[], bool]]:
        """Hold the lock of the host, see `lock.held`."""
        return lock.held(self.folder, operator, doing, wait)

    def holder(self) -> Record | None:
        """Who holds the lock right now, or None."""
        return lock.holder(self.folder)

    # Cleaning --------------------------------------------------------------------------------------------------

    def leftovers(self) -> list[Path]:
        """What a run that was cut off has left here and nobody needs: copies, unfinished files, staged deployments.

        Nothing counts as left over while files of a deployment are in the tree that the history does not know: its
        backups are then the only way back. What was not made by this tool does not count either.
        """
        try:
            events = self.events()
            known = {e["id"] for e in events} - {e["id"] for e in events if e["event"] == PRUNED}
            found = [self.deployment(n) for n in self.deployments() if n not in known]
            found += [self.folder / name for name in ("undo", ".journal.json.tmp")]
            if not events:
                # Its first line never became whole.
                found.append(self.folder / "history.jsonl")
            found = [path for path in found if os.path.lexists(path)]
            if not found or self.journal() is not None or unrecorded(self) or (not events and marked(self)):
                return []
        except Refusal:
            # Damaged state is evidence; whoever came here is told about it by the operation itself.
            return []
        return found

    def bare(self) -> bool:
        """Whether the state folder is there, and holds nothing but a lock at most."""
        try:
            return set(os.listdir(self.folder)) <= {"lock"}
        except (FileNotFoundError, NotADirectoryError):
            return False

    def tidy(self) -> None:
        """Remove what a push that was refused or killed before its journal has left; the caller holds the lock.

        A state folder that holds nothing goes as well. What cannot be removed waits for the next contact: an answer
        about the operation itself is worth more than one about its left-overs.
        """
        with contextlib.suppress(OSError, Refusal):
            for path in self.leftovers():
                remove(path)
            with contextlib.suppress(OSError):
                (self.folder / "deployments").rmdir()
            if self.bare():
                self.purge()

    def purging(self) -> bool:
        """Whether the removal of everything has begun: nothing in here counts any more."""
        return os.path.lexists(self.folder / "purging")

    def purge(self) -> None:
        """Remove the whole state folder; the caller holds the lock. The lock file goes last.

        Once begun it is finished, by the next contact if need be: half a history would tell lies.
        """
        if (self.folder / "history.jsonl").exists():
            # In one step, and without an inode that a full disk would not give.
            os.replace(self.folder / "history.jsonl", self.folder / "purging")
            fsync_folder(self.folder)
        for name in sorted(os.listdir(self.folder), key=lambda n: _LAST.index(n) if n in _LAST else -1):
            remove(self.folder / name)
        # Somebody who waited for the lock may have made a new one already; the folder is theirs to remove then.
        with contextlib.suppress(OSError):
            self.folder.rmdir()
        fsync_folder(self.folder.parent)


#: What goes last when everything is removed, in this order.
_LAST = ("purging", "lock")


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it, if it is there. A link is removed, not what it leads to."""
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


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
        next_step=f"{step}  # on the host\nddtree-overlay status {{target}}",
    )
