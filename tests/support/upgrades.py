# SPDX-License-Identifier: Apache-2.0
"""An SGLang behind an sshd that pip and uv upgrade under its overlay."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.installs import Install, bundle_for
from tests.support.packages import Pip, Uv
from tests.support.trees import listing

from ddtree_overlay import deploy
from ddtree_overlay.errors import OverlayError
from ddtree_overlay.hosts.transport import AgentTransport, open_transport
from ddtree_overlay.manifest import Bundle
from ddtree_overlay.plans import Deployment, PushPlan, Status


if TYPE_CHECKING:
    from tests.support.sshd import SshServer


OLD, NEW, UNKNOWN = "0.5.11", "0.5.12", "0.9.0"
COMMON = {"__init__.py": b"", "srt/__init__.py": b"", "srt/speculative/dflash_worker.py": b"DFLASH = 1\n"}
#: What each version consists of; one module is gone in the newer one, and another one is new.
FILES = {
    OLD: {**COMMON, "srt/a.py": b"VALUE = 1\n", "srt/b.py": b"VALUE = 2\n", "srt/gone.py": b"GONE = 1\n"},
    NEW: {**COMMON, "srt/a.py": b"VALUE = 100\n", "srt/b.py": b"VALUE = 200\n", "srt/fresh.py": b"FRESH = 1\n"},
    UNKNOWN: {**COMMON, "srt/a.py": b"VALUE = 1000\n", "srt/b.py": b"VALUE = 2000\n"},
}
TREE, NAMES, FIRST = (f"srt/speculative/ddtree/{name}.py" for name in ("tree", "names", "first"))
#: The overlay for each: one module is the same for both, one differs, and the older one has one more.
RESULTS = {
    OLD: {
        "srt/a.py": b"VALUE = 5\n",
        "srt/gone.py": b"GONE = 5\n",
        TREE: b"T = 1\n",
        NAMES: b"N = 11\n",
        FIRST: b"F\n",
    },
    NEW: {"srt/a.py": b"VALUE = 500\n", TREE: b"T = 1\n", NAMES: b"N = 12\n"},
}


class Case:
    """An SGLang that was installed by pip, behind an sshd."""

    def __init__(self, install: Install, sshd: SshServer, wheels: dict[str, Path], folder: Path) -> None:
        self.install = install
        self.pip = Pip(install.python)
        self.uv = Uv(folder.parent / "uv-cache")
        self.wheels = wheels
        self.folder = folder
        self.host = sshd.host("gpu", str(install.python))
        self.transport: AgentTransport = open_transport(self.host)

    def upgrade(self, version: str = NEW, *options: str) -> None:
        """Install the release over what is there; by uv, which takes a tenth of the time that pip does."""
        self.uv("pip", "install", "--python", self.install.python, "--no-deps", *options, self.wheels[version])

    def bundle(self, version: str) -> tuple[Bundle, dict[str, bytes]]:
        """The overlay for the release, built from its wheel."""
        folder = self.folder / f"unpacked-{version}"
        if not folder.exists():
            with zipfile.ZipFile(self.wheels[version]) as archive:
                archive.extractall(folder)
        return bundle_for(folder / "sglang", RESULTS[version], version)

    def plan(self, version: str) -> PushPlan:
        """What a push of the overlay for the release would do."""
        return deploy.plan_push(self.transport, self.bundle(version)[0], self.bundle(version)[1])

    def push(self, version: str) -> Deployment:
        """Push the overlay for the release."""
        plan = self.plan(version)
        return deploy.push(self.transport, plan, self.bundle(version)[1], operator="ann@desk")

    def status(self) -> Status:
        """What is on the host."""
        return deploy.status(self.transport)

    def tree(self) -> dict[str, str]:
        """The package without compiled files."""
        found = listing(self.install.root)
        return {path: what for path, what in found.items() if "__pycache__" not in path}

    def is_pristine(self, version: str) -> bool:
        """Whether the package holds the files of the release, and nothing else but compiled files."""
        found = {p.relative_to(self.install.root).as_posix(): p for p in self.install.root.rglob("*") if p.is_file()}
        return {n: p.read_bytes() for n, p in found.items() if "__pycache__" not in n} == FILES[version]


def refused(what: str, call: Any, *args: Any, **more: Any) -> OverlayError:
    """The error that `call` ends with."""
    with pytest.raises(OverlayError, match=what) as caught:
        call(*args, **more)
    return caught.value
