# SPDX-License-Identifier: Apache-2.0
"""Published SGLang wheels for tests: downloaded once into the project's cache, read without being unpacked."""

from __future__ import annotations

import functools
import subprocess
import sys
import zipfile
from pathlib import Path

from ddtree_overlay import receivers
from ddtree_overlay.manifest import FileEntry, Manifest, sha256
from ddtree_overlay.verify.mentions import WATCHED


#: Resolved: it may be a link, and paths that are reported are those behind links.
CACHE = (Path(__file__).parents[2] / ".cache").resolve()
WHEELS = CACHE / "wheels"
RELEASE = "0.5.11"


@functools.cache
def wheel(version: str = RELEASE) -> Path:
    """The wheel of an SGLang version."""
    found = sorted(WHEELS.rglob(f"sglang-{version}-*.whl"))
    if not found:
        WHEELS.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        target = ["--python-version", "3.11", "--platform", "manylinux_2_34_x86_64", "--platform", "any"]
        subprocess.run([*command, *target, "--dest", str(WHEELS), f"sglang=={version}"], check=True, timeout=240)
        found = sorted(WHEELS.rglob(f"sglang-{version}-*.whl"))
    return found[0]


@functools.cache
def package(version: str = RELEASE) -> dict[str, bytes]:
    """Every Python file under `srt/`, and what a snapshot takes from elsewhere, by package-relative path.

    Shared: copy it before you change it.
    """
    taken = receivers.paths()
    with zipfile.ZipFile(wheel(version)) as archive:
        paths = {name.removeprefix("sglang/"): name for name in archive.namelist() if name.endswith(".py")}
        return {path: archive.read(name) for path, name in paths.items() if path.startswith("srt/") or path in taken}


@functools.cache
def mentions(version: str = RELEASE) -> tuple[str, ...]:
    """Every file under `srt/` that mentions DFlash."""
    files = {path: data for path, data in package(version).items() if path.startswith("srt/")}
    return tuple(sorted(path for path, data in files.items() if WATCHED.search(data)))


def snapshot(wanted: frozenset[str], version: str = RELEASE) -> tuple[Manifest, dict[str, bytes]]:
    """What a snapshot of the wheel holds: `wanted` and every file that mentions DFlash."""
    files = {path: package(version)[path] for path in sorted({*wanted, *mentions(version)}) if path in package(version)}
    entries = tuple(FileEntry(path, sha256(data), len(data)) for path, data in files.items())
    versions = {"sglang": version, "python": None}
    return Manifest(f"sglang-{version}", "", "unpacked", versions, entries, mentions(version)), files
