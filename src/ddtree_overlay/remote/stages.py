# SPDX-License-Identifier: Apache-2.0
"""Files of a push that wait for it in the state folder: on the package's file system, and where nothing imports them.

stage/NAME/PATH                     one folder a push; whoever staged removes it, and so does the push itself
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

from .common import Refusal, digest, inside, read_file
from .store import Store


#: Chosen by the operator's side, the same for every host of one command.
_NAME = re.compile(r"[0-9a-f]{16}\Z")
#: A stage that nobody has fetched for so long was left behind by a command that was killed.
STALE_SECONDS = 86400


def folder_of(store: Store, name: str) -> Path:
    """Where the stage `name` is."""
    if not _NAME.match(name):
        raise Refusal("failed", f"refusing the name {name!r} of a stage")
    return store.folder / "stage" / name


def keep(store: Store, name: str, files: dict[str, bytes]) -> None:
    """Write `files` into a new stage and read them back; the caller holds the lock.

    Raises:
        Refusal: There is a stage of this name: one command has come here under two names of the host.
    """
    folder = folder_of(store, name)
    if folder.exists():
        raise Refusal(
            "failed",
            f"this host is named twice: another of the hosts leads to the same SGLang in {store.root}",
            why="both would change the same files",
            next_step="name only one of them",
        )
    folder.mkdir(parents=True)
    try:
        for path, data in files.items():
            place = inside(folder, path)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
        damaged = [path for path, data in files.items() if read_file(inside(folder, path)) != data]
        if damaged:
            raise Refusal("failed", f"{damaged[0]} could not be staged as it is in {folder}", why="nothing was changed")
    except BaseException:
        drop(store, name)
        raise


def bring(store: Store, name: str, changes: list[dict[str, Any]]) -> dict[str, bytes]:
    """The staged file of each of `changes`, checked.

    Raises:
        Refusal: A file is gone or is not as it was staged.
    """
    folder = folder_of(store, name)
    found = {}
    for change in changes:
        path = change["path"]
        try:
            found[path] = read_file(inside(folder, path))
        except FileNotFoundError:
            raise _spoilt(folder, f"{path} is gone") from None
        if digest(found[path]) != change["after"]:
            raise _spoilt(folder, f"{path} was changed")
    return found


def _spoilt(folder: Path, why: str) -> Refusal:
    return Refusal(
        "conflict",
        f"the staged files in {folder} are not as they were staged: {why}",
        why="another push or rollback --purge has come in between; nothing was changed",
        next_step="run the same command again",
    )


def drop(store: Store, name: str) -> None:
    """Remove the stage `name` if it is there; the caller holds the lock."""
    shutil.rmtree(folder_of(store, name), ignore_errors=True)
    _drop_empty(store)


def sweep(store: Store) -> None:
    """Remove stages that were left behind; the caller holds the lock."""
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(store.folder / "stage"):
            stage = store.folder / "stage" / name
            if _NAME.match(name) and time.time() - stage.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(stage, ignore_errors=True)
    _drop_empty(store)


def _drop_empty(store: Store) -> None:
    with contextlib.suppress(OSError):
        (store.folder / "stage").rmdir()
