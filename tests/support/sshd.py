# SPDX-License-Identifier: Apache-2.0
"""A real sshd of our own: loopback only, own keys and configuration, nothing installed system-wide.

Used by the tests and by the demo. Where no sshd is installed, the distribution's package is unpacked into the project's
cache. As root it runs in a private mount namespace, which also gives it the `sshd` user and the folder that it wants.
"""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import os
import pwd
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from ddtree_overlay.config import Host


START_SECONDS = 15
_PRIVSEP_FOLDER = Path("/run/sshd")


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
            depends = _run(["apt-cache", *options, "depends", "openssh-server"]).stdout
            names = {line.split()[-1] for line in depends.splitlines() if line.strip().startswith("Depends: lib")}
            _download(sorted(names), Path(temp), options)
            _extract(Path(temp), tree)
        with contextlib.suppress(OSError):  # somebody else was faster
            os.rename(tree, root)


def _download(packages: list[str], folder: Path, options: list[str]) -> list[str]:
    """Fetch packages into `folder`; gives the apt options that worked. Without package lists, a private set is made."""
    done = _run(["apt-get", *options, "download", "--quiet", *packages], folder)
    if done.returncode == 0:
        return options
    private = ["-o", f"Dir::State::Lists={folder}/lists", "-o", f"Dir::Cache={folder}/cache"]
    (folder / "lists/partial").mkdir(parents=True, exist_ok=True)
    (folder / "cache/archives/partial").mkdir(parents=True, exist_ok=True)
    _run(["apt-get", *private, "update", "--quiet"], folder)
    done = _run(["apt-get", *private, "download", "--quiet", *packages], folder)
    if done.returncode:
        raise SshdUnavailable(f"no sshd is installed, and apt-get cannot fetch one: {done.stderr.strip()[-200:]}")
    return private


def _extract(folder: Path, tree: Path) -> None:
    for package in folder.glob("*.deb"):
        done = _run(["dpkg", "-x", str(package), str(tree)])
        if done.returncode:
            raise SshdUnavailable(f"{package.name} cannot be unpacked: {done.stderr.strip()[-200:]}")


def _library_folder(root: Path) -> Path | None:
    return next((p.parent for p in root.glob("usr/lib/*/libwrap.so*")), None)


def _missing_libraries(binary: Binary) -> list[str]:
    done = subprocess.run(["ldd", binary.path], check=False, capture_output=True, text=True, env=binary.environment)
    return [line.split()[0] for line in done.stdout.splitlines() if "not found" in line]


def _run(words: list[str], cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(words, check=False, cwd=cwd, capture_output=True, text=True, timeout=180)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise SshdUnavailable(f"{words[0]} cannot be run: {e}") from e


@dataclass
class SshServer:
    """A running sshd; a context manager that stops it."""

    folder: Path
    port: int
    user: str
    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, folder: Path, cache: Path, *, options: str = "", bashrc: str = "", namespace: str = "") -> SshServer:
        """Start an sshd whose files live in `folder`.

        Args:
            folder: Created if needed.
            cache: Where an unpacked sshd is kept between runs.
            options: More lines for its configuration; they win over ours.
            bashrc: What the login shell's start-up file holds.
            namespace: Shell lines that run first in its private mount namespace (root only).

        Raises:
            SshdUnavailable: No sshd can be had, or it does not start.
        """
        binary = find_sshd(cache)
        folder.mkdir(parents=True, exist_ok=True)
        port = _free_port()
        _write_files(folder, port, options, bashrc)
        words = _command(binary, folder, namespace)
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=binary.environment, start_new_session=True
            )
        server = cls(folder, port, getpass.getuser(), process)
        try:
            server._wait()
        except BaseException:
            server.stop()
            raise
        return server

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1) as sock:
                if sock.recv(4) == b"SSH-":
                    return
            time.sleep(0.05)
        raise SshdUnavailable(f"sshd did not start: {self.log().strip()[-300:] or 'it said nothing'}")

    @property
    def identity(self) -> Path:
        """The private key that may log in."""
        return self.folder / "identity"

    @property
    def known_hosts(self) -> Path:
        """A known_hosts file with the right line."""
        return self.folder / "known_hosts"

    @property
    def home(self) -> Path:
        """The home folder of logins, where there is a private namespace."""
        return self.folder / "home"

    def log(self) -> str:
        """What sshd has logged so far (LogLevel VERBOSE)."""
        return (self.folder / "log").read_text(errors="replace")

    def host(self, name: str = "ct200", python: str = "python3", **over: Any) -> Host:
        """The server as a host of deploy.toml."""
        host = Host(
            name=name,
            address="127.0.0.1",
            port=self.port,
            user=self.user,
            python=python,
            identity_file=str(self.identity),
            known_hosts=str(self.known_hosts),
            ssh_config="/dev/null",
            timeout=30.0,
        )
        return dataclasses.replace(host, **over)

    def toml(self, name: str, python: str) -> str:
        """The server as a table of deploy.toml."""
        host = self.host(name, python)
        keys = ("address", "port", "user", "python", "identity_file", "known_hosts", "ssh_config")
        lines = [
            f"{k} = {v if isinstance(v, int) else chr(34) + str(v) + chr(34)}" for k in keys for v in [getattr(host, k)]
        ]
        return "\n".join([f"[hosts.{name}]", *lines, ""])

    def stop(self) -> None:
        """End the server and the sessions that are still open."""
        for pid in [self.process.pid, *_children(self.process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> SshServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def sessions_of(server: SshServer) -> list[int]:
    """The processes of the server's open connections."""
    found, todo = [], [server.process.pid]
    while todo:
        todo = [child for parent in todo for child in _children(parent)]
        found += todo
    return found


def _children(parent: int) -> list[int]:
    """The processes that `parent` started, sessions of sshd among them."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            if int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]) == parent:
                found.append(int(folder.name))
    return found


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _write_files(folder: Path, port: int, options: str, bashrc: str) -> None:
    for name in ("host_ed25519", "identity"):
        if not (folder / name).exists():
            _run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / name)])
    if not (folder / "identity.pub").is_file():
        raise SshdUnavailable("there is no ssh-keygen to make keys with")
    public = (folder / "host_ed25519.pub").read_text().split()
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {public[0]} {public[1]}\n")
    (folder / "home").mkdir(exist_ok=True)
    (folder / "home/.bashrc").write_text(bashrc)
    config = f"""{options}
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_ed25519
AuthorizedKeysFile {folder}/identity.pub
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
PidFile none
LogLevel VERBOSE
"""
    if os.geteuid() != 0 and bashrc:
        # Without a namespace of its own the login keeps its real home; bash reads this instead.
        config += f"SetEnv BASH_ENV={folder}/home/.bashrc\n"
    (folder / "sshd_config").write_text(config)


def _command(binary: Binary, folder: Path, namespace: str) -> list[str]:
    sshd = [str(binary.path.resolve()), "-D", "-e", "-f", str(folder / "sshd_config")]
    if os.geteuid() != 0:
        if namespace:
            raise SshdUnavailable("a private mount namespace needs root")
        return sshd
    if (
        not shutil.which("unshare")
        or subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode
    ):
        if namespace or not (_has_user("sshd") and _PRIVSEP_FOLDER.is_dir()):
            raise SshdUnavailable("as root, sshd needs a private mount namespace here, and unshare is not allowed")
        return sshd
    passwd = folder / "passwd"
    passwd.write_text(_passwd(folder / "home"))
    lines = [f"mount --bind {shlex.quote(str(passwd))} /etc/passwd"]
    if not _PRIVSEP_FOLDER.is_dir():
        lines += ["mount -t tmpfs -o mode=755 tmpfs /run", f"mkdir {_PRIVSEP_FOLDER}"]
    script = "\n".join(["set -e", *lines, namespace, f"exec {shlex.join(sshd)}"])
    return ["unshare", "-m", "--propagation", "private", "sh", "-c", script]


def _has_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def _passwd(home: Path) -> str:
    """The system's users, with another home for root and with the user that sshd drops its privileges to."""
    lines = []
    for line in Path("/etc/passwd").read_text().splitlines():
        fields = line.split(":")
        if fields[0] == "root":
            fields[5] = str(home)
        lines.append(":".join(fields))
    if not _has_user("sshd"):
        lines.append("sshd:x:65533:65534::/run/sshd:/usr/sbin/nologin")
    return "\n".join([*lines, ""])
