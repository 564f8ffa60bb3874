# SPDX-License-Identifier: Apache-2.0
"""Whole folders as comparable values: every name, kind, mode and byte."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path


#: Relative path -> what is there: kind, mode, and digest or link target.
Listing = dict[str, str]


def listing(root: Path) -> Listing:
    """Everything below `root`, folders and links included. Times and inode numbers are left out on purpose."""
    found: Listing = {}
    for folder, folders, files in os.walk(root):
        for name in folders + files:
            path = Path(folder, name)
            found[path.relative_to(root).as_posix()] = _describe(path)
    return found


def differences(before: Listing, after: Listing) -> list[str]:
    """One line for each path that was added, removed or changed; empty when the trees are equal."""
    lines = [f"added    {path} ({after[path]})" for path in sorted(after.keys() - before.keys())]
    lines += [f"removed  {path} ({before[path]})" for path in sorted(before.keys() - after.keys())]
    lines += [
        f"changed  {path}: {before[path]} -> {after[path]}"
        for path in sorted(before.keys() & after.keys())
        if before[path] != after[path]
    ]
    return lines


def _describe(path: Path) -> str:
    info = path.lstat()
    mode = f"{stat.S_IMODE(info.st_mode):04o} {info.st_uid}:{info.st_gid}"
    if stat.S_ISLNK(info.st_mode):
        return f"link to {path.readlink()}"
    if stat.S_ISDIR(info.st_mode):
        return f"folder {mode}"
    if not stat.S_ISREG(info.st_mode):
        return f"special file {mode}"
    return f"file {mode} {hashlib.sha256(path.read_bytes()).hexdigest()}"
