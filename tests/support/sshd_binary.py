# SPDX-License-Identifier: Apache-2.0
"""An sshd to run: the machine's own, or the distribution's package unpacked into the project's cache."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path


class SshdUnavailable(Exception):  # noqa: N818 - a state of this machine, not a fault
    """No sshd can be had or started here; the text says why."""


@dataclass(frozen=True)
class Binary:
    """An sshd and the folder with the libraries that the system lacks."""

    path: Path
    libraries: Path | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The environment to start it in."""
        return {**os.environ, **({"LD_LIBRARY_PATH": str(self.libraries)} if self.libraries else {})}


def find_sshd(cache: Path) -> Binary:
    """The system's sshd, else one unpacked into `cache`.

    Raises:
        SshdUnavailable: There is none and none can be fetched.
    """
    installed = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if installed:
        return Binary(Path(installed))
    root = cache / "sshd"
    if not (root / "usr/sbin/sshd").is_file():
        _unpack_packages(root, cache)
    found = Binary(root / "usr/sbin/sshd", _library_folder(root))
    missing = _missing_libraries(found)
    if missing:
        raise SshdUnavailable(f"the unpacked sshd lacks {', '.join(missing)}")
    return found


def _unpack_packages(root: Path, cache: Path) -> None:
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        raise SshdUnavailable("no sshd is installed, and there is no apt-get to fetch one with")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as temp:
        tree = Path(temp, "tree")
        options = _download(["openssh-server"], Path(temp), [])
        _extract(Path(temp), tree)
        if _missing_libraries(Binary(tree / "usr/sbin/sshd", _library_folder(tree))):
            depends = run_tool(["apt-cache", *options, "depends", "openssh-server"]).stdout
            names = {line.split()[-1] for line in depends.splitlines() if line.strip().startswith("Depends: lib")}
            _download(sorted(names), Path(temp), options)
            _extract(Path(temp), tree)
        with contextlib.suppress(OSError):  # somebody else was faster
            os.rename(tree, root)


def _download(packages: list[str], folder: Path, options: list[str]) -> list[str]:
    """Fetch packages into `folder`; gives the apt options that worked. Without package lists, a private set is made."""
    done = run_tool(["apt-get", *options, "download", "--quiet", *packages], folder)
    if done.returncode == 0:
        return options
    private = ["-o", f"Dir::State::Lists={folder}/lists", "-o", f"Dir::Cache={folder}/cache"]
    (folder / "lists/partial").mkdir(parents=True, exist_ok=True)
    (folder / "cache/archives/partial").mkdir(parents=True, exist_ok=True)
    run_tool(["apt-get", *private, "update", "--quiet"], folder)
    done = run_tool(["apt-get", *private, "download", "--quiet", *packages], folder)
    if done.returncode:
        raise SshdUnavailable(f"no sshd is installed, and apt-get cannot fetch one: {done.stderr.strip()[-200:]}")
    return private


def _extract(folder: Path, tree: Path) -> None:
    for package in folder.glob("*.deb"):
        done = run_tool(["dpkg", "-x", str(package), str(tree)])
        if done.returncode:
            raise SshdUnavailable(f"{package.name} cannot be unpacked: {done.stderr.strip()[-200:]}")


def _library_folder(root: Path) -> Path | None:
    return next((p.parent for p in root.glob("usr/lib/*/libwrap.so*")), None)


def _missing_libraries(binary: Binary) -> list[str]:
    done = subprocess.run(["ldd", binary.path], check=False, capture_output=True, text=True, env=binary.environment)
    return [line.split()[0] for line in done.stdout.splitlines() if "not found" in line]


def run_tool(words: list[str], cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """What a program of this machine says; one that is not there, or hangs, means that no sshd can be had."""
    try:
        return subprocess.run(words, check=False, cwd=cwd, capture_output=True, text=True, timeout=180)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise SshdUnavailable(f"{words[0]} cannot be run: {e}") from e
