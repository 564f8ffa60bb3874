# SPDX-License-Identifier: Apache-2.0
"""Small wheels of SGLang, and the real pip and uv that install them; pip can be killed, or watched, file by file."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


#: Python's own hook at start-up: does something whenever pip is about to touch a file of the package.
_HOOK = """
import os, shutil, sys
site = {site!r}
touched = [0]
def hook(event, args):
    if event in ("open", "os.rename", "os.remove", "shutil.move"):
        path = str(args[1] if event in ("os.rename", "shutil.move") else args[0])
        writes = event != "open" or (isinstance(args[1], str) and args[1].startswith("w"))
        if writes and path.startswith(site) and "__pycache__" not in path:
            touched[0] += 1
            {action}
sys.addaudithook(hook)
"""
_KILL = "if touched[0] == {count}: os.kill(os.getpid(), 9)"
_COPY = """
            for name in os.listdir(site):
                if name.startswith(("sglang", "~", ".ddtree")):
                    shutil.copytree(site + "/" + name, {folder!r} + "/%03d/" % touched[0] + name, symlinks=True)
"""


def build_wheel(folder: Path, version: str, files: Mapping[str, bytes], *, requires: str = "") -> Path:
    """A wheel of SGLang `version`; `files` by package-relative path."""
    info = f"sglang-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n{requires}"
    tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    named = {f"sglang/{path}": data for path, data in files.items()}
    named |= {f"{info}/METADATA": metadata.encode(), f"{info}/WHEEL": tags.encode()}
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"sglang-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        lines = []
        for name, data in named.items():
            archive.writestr(name, data)
            code = urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            lines.append(f"{name},sha256={code},{len(data)}\n")
        archive.writestr(f"{info}/RECORD", "".join([*lines, f"{info}/RECORD,,\n"]))
    return wheel


@dataclass(frozen=True)
class Pip:
    """The pip of this environment, at work on another one."""

    python: Path

    def __call__(self, *words: object) -> None:
        """Run it without a network."""
        code, error = self._run(words, {})
        assert code == 0, error

    def fails(self, *words: object) -> str:
        """Run it, and expect it to fail; gives what it says."""
        code, error = self._run(words, {})
        assert code != 0
        return error

    def killed(self, count: int, hooks: Path, *words: object) -> None:
        """Run it, and have it killed when it is about to touch the nth file of the package."""
        code, error = self._run(words, self._hooked(hooks, _KILL.format(count=count)))
        assert code == -9 or "SIGKILL" in error or code > 128, (code, error)

    def watched(self, folder: Path, hooks: Path, *words: object) -> list[Path]:
        """Run it; gives a copy of the package and what lies beside it for every moment before it touched a file."""
        code, error = self._run(words, self._hooked(hooks, _COPY.format(folder=str(folder))))
        assert code == 0, error
        return sorted(folder.iterdir())

    def _hooked(self, hooks: Path, action: str) -> dict[str, str]:
        hooks.mkdir(exist_ok=True)
        site = next((self.python.parents[1] / "lib").glob("python*/site-packages"))
        (hooks / "sitecustomize.py").write_text(_HOOK.format(site=str(site), action=action))
        return {"PYTHONPATH": str(hooks)}

    def _run(self, words: tuple[object, ...], more: dict[str, str]) -> tuple[int, str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTHON", "VIRTUAL_ENV"))}
        env |= {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_CACHE_DIR": "1"}
        command = [sys.executable, "-m", "pip", "--python", self.python, *words]
        done = subprocess.run(command, env={**env, **more}, capture_output=True, text=True, check=False, timeout=240)
        return done.returncode, done.stderr


@dataclass(frozen=True)
class Uv:
    """uv with a cache of its own, which hard-links what it installs."""

    cache: Path

    def __call__(self, *words: object) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("UV_", "VIRTUAL_ENV"))}
        env |= {"UV_CACHE_DIR": str(self.cache), "UV_OFFLINE": "1", "UV_LINK_MODE": "hardlink", "UV_NO_CONFIG": "1"}
        uv = Path(sys.executable).with_name("uv")
        done = subprocess.run([uv, *words], env=env, capture_output=True, text=True, check=False, timeout=240)
        assert done.returncode == 0, done.stderr
