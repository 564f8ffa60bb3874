# SPDX-License-Identifier: Apache-2.0
"""Installed packages to work on, and bundles made by hand so that these tests need no edit of a real release."""

from __future__ import annotations

import os
import shutil
import subprocess
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.waiting import HANG

from ddtree_overlay.config import Host
from ddtree_overlay.manifest import Bundle, Change, sha256


EDITED = ("srt/server_args.py", "srt/speculative/spec_info.py")
ADDED = ("srt/speculative/ddtree/__init__.py", "srt/speculative/ddtree/tree.py")


@dataclass(frozen=True)
class Install:
    """An SGLang that `python` imports."""

    python: Path
    site: Path

    @property
    def root(self) -> Path:
        """The package folder."""
        return self.site / "sglang"

    @property
    def state(self) -> Path:
        """Where the agent keeps its state."""
        return self.site / ".ddtree-overlay"

    def host(self, name: str = "here", **over: object) -> Host:
        """This install as a host of deploy.toml, reached without SSH."""
        fields = {"name": name, "address": name, "python": str(self.python), "transport": "local", **over}
        return Host(**fields)  # type: ignore[arg-type]

    def run(self, code: str, **env: str) -> str:
        """What `code` prints under this interpreter, bytecode allowed."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        done = subprocess.run(
            [self.python, "-c", code],
            env={**clean, **env},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=HANG,
            check=True,
        )
        return done.stdout.strip()


def new_venv(folder: Path) -> tuple[Path, Path]:
    """An empty virtual environment: its interpreter and its site-packages."""
    venv.create(folder, with_pip=False, symlinks=True)
    return folder / "bin/python", next((folder / "lib").glob("python*/site-packages"))


def install(folder: Path, wheel_site: Path) -> Install:
    """A virtual environment with SGLang, its files hard links to `wheel_site` as uv makes them."""
    python, site = new_venv(folder)
    shutil.copytree(wheel_site, site, copy_function=os.link, dirs_exist_ok=True)
    return Install(python, site)


def tiny_package(site: Path, version: str, files: Mapping[str, bytes] | None = None, name: str = "sglang") -> None:
    """A package with the outline of SGLang and metadata of `version`."""
    default = {"__init__.py": b"", "srt/__init__.py": b"", "srt/a.py": b"VALUE = 1\n", "srt/b.py": b"VALUE = 2\n"}
    for path, data in (default if files is None else dict(files)).items():
        target = site / name / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def bundle_for(root: Path, results: Mapping[str, bytes], release: str = "0.5.11") -> tuple[Bundle, dict[str, bytes]]:
    """The bundle that makes `results` out of the files that are in `root` now."""
    changes = []
    for path, data in sorted(results.items()):
        base = (root / path).read_bytes() if (root / path).is_file() else None
        changes.append(Change(path, sha256(base) if base is not None else None, sha256(data), data.count(b"\n"), 0))
    return Bundle(release, tuple(changes)), dict(results)


def overlay_for(root: Path, mark: bytes = b"DDTREE = 1\n") -> tuple[Bundle, dict[str, bytes]]:
    """A small overlay on a real SGLang: two edited files, two new ones in a new folder."""
    results = {p: (root / p).read_bytes() + b"\n" + mark for p in EDITED}
    results.update(dict.fromkeys(ADDED, b"# new\n" + mark))
    return bundle_for(root, results)
