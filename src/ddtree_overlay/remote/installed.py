# SPDX-License-Identifier: Apache-2.0
"""Whether the installed SGLang is one release, and all of it: an installer that is cut off leaves parts of two.

pip and uv write a folder `sglang-VERSION.dist-info` beside the package. Its RECORD lists every file with its size, and
is put in place last. A checkout has no such folder beside it, and nothing is known of it then.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .common import PACKAGE, Refusal, inside
from .locate import Site


#: A module of the package below srt/ in RECORD, with its size; a name with a comma or a quote is not one of SGLang's.
_ROW = re.compile(rb"^%s/(srt/[^\",\n]+\.py),[^,\n]*,(\d*)\r?$" % PACKAGE.encode(), re.MULTILINE)
#: What pip calls the old files until the new ones are complete: `~glang`, or more signs where that is taken.
_STASH = re.compile(r"~.{0,3}%s" % re.escape(PACKAGE[4:]))
#: Not that of `sglang-router`, which older tools wrote with a hyphen.
_VERSION = re.compile(r"%s-([0-9][^-]*)\.dist-info\Z" % re.escape(PACKAGE))


@dataclass(frozen=True)
class Installed:
    """What the installer wrote down beside the package.

    `fault` says why the package cannot be one whole release, or is empty. `sizes` are the sizes of its modules below
    srt/ as RECORD lists them, None where there is no RECORD. `since` is when an installer was last at work.
    """

    fault: str
    sizes: dict[str, int] | None
    since: float | None


def installed(site: Site, record: dict[str, Any] | None = None) -> Installed:
    """Look at the metadata beside the package.

    The files of `record`, the live deployment, are judged by their digests elsewhere: one of them that somebody has
    deleted makes no half of an installation.
    """
    folder = site.seen.parent
    names = sorted(n for n in os.listdir(folder) if _VERSION.match(n)) if folder.is_dir() else []
    if not site.importable:
        return Installed(_cut_off(folder).lstrip("; "), None, None)
    if len(names) > 1:
        both = " and ".join(_VERSION.sub(r"\1", n) for n in names)
        return Installed(f"two versions are recorded as installed in {folder}: {both}", None, None)
    if not names:
        # A checkout that is found by its path has no metadata, nor had it when the overlay was pushed.
        had = record is not None and record["version"] is not None and site.install in ("wheel", "user-site")
        gone = had or bool(_stashes(folder))
        return Installed(f"its metadata is gone from {folder}{_cut_off(folder)}" if gone else "", None, None)
    info = folder / names[0]
    since = info.stat().st_mtime
    try:
        rows = _ROW.findall((info / "RECORD").read_bytes())
    except FileNotFoundError:
        never = (info / "WHEEL").exists() or not (info / "METADATA").exists()
        fault = f"its installation was never finished: {info} has no RECORD{_cut_off(folder)}" if never else ""
        return Installed(fault, None, since)
    sizes = {path.decode("utf-8", "surrogateescape"): int(size or -1) for path, size in rows}
    missing = sorted(sizes.keys() - _modules(site.root) - (record["files"].keys() if record else set()))
    if missing:
        which = f"{missing[0]}{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}"
        fault = f"{len(missing)} of {len(sizes)} modules that its metadata lists are missing: {which}"
        return Installed(f"{fault}{_cut_off(folder)}", sizes, since)
    return Installed("", sizes, since)


def of_another_size(site: Site, sizes: dict[str, int], known: set[str]) -> list[str]:
    """The modules that have not the size that RECORD lists, without those in `known`."""
    found = []
    for path, size in sizes.items():
        if path not in known and size >= 0 and inside(site.root, path).stat().st_size != size:
            found.append(path)
    return sorted(found)


def remedy(site: Site, version: str | None) -> str:
    """The command that makes a package whole again; `version` is the one that is wanted."""
    version = site.version or version or "VERSION"
    pip = f"{shlex.quote(sys.executable)} -m pip"
    # Of what was never finished pip can uninstall nothing, and would not install over it either.
    lines = f"{pip} uninstall -y {PACKAGE}\n{pip} install --no-deps --ignore-installed {PACKAGE}=={version}"
    return f"# on the host:\n{lines}\n# here:\nddtree-overlay status {{target}}"


def not_whole(fault: str, step: str) -> Refusal:
    """The refusal to take half of an installation for one."""
    return Refusal(
        "conflict",
        f"SGLang is not whole on this host: {fault}",
        why="an installer was cut off, or is at work right now; nothing was changed",
        next_step=step,
    )


def _modules(root: Path) -> set[str]:
    """Every module below srt/, package-relative. Only names are read: thousands of `stat` calls would take longer."""
    found: set[str] = set()
    linked: set[tuple[int, int]] = set()
    folders = ["srt"]
    while folders:
        folder = folders.pop()
        try:
            entries = list(os.scandir(root / folder))
        except OSError:
            continue
        for entry in entries:
            if entry.name.endswith(".py"):
                found.add(f"{folder}/{entry.name}")
            elif entry.name != "__pycache__" and entry.is_dir() and not _again(entry, linked):
                folders.append(f"{folder}/{entry.name}")
    return found


def _again(entry: os.DirEntry[str], linked: set[tuple[int, int]]) -> bool:
    """Whether a link leads to a folder for the second time: one that leads to a folder above it would have no end."""
    if not entry.is_symlink():
        return False
    st = entry.stat()
    known = (st.st_dev, st.st_ino) in linked
    linked.add((st.st_dev, st.st_ino))
    return known


def _stashes(folder: Path) -> list[str]:
    return sorted(n for n in os.listdir(folder) if _STASH.match(n))


def _cut_off(folder: Path) -> str:
    stashes = _stashes(folder)
    return f"; pip has left the old files in {stashes[0]}" if stashes else ""
