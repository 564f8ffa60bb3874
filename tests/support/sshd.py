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
import re
import shlex
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support.ports import free_port
from tests.support.sshd_binary import Binary, SshdUnavailable, find_sshd, run_tool
from tests.support.waiting import HANG, until

from ddtree_overlay.config import Host


_PRIVSEP_FOLDER = Path("/run/sshd")
#: A line about the end of a connection, and the client's port.
_ENDED = r"(?:Connection (?:reset|closed) by|Disconnected from|Read error from|.*_fatal: ).*?port (\d+)"


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
        port = free_port()
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
        deadline = time.monotonic() + HANG
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=5) as sock:
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
            timeout=HANG,
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
            # It is not waited for as what is tested: then it is killed.
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


def kill_sessions(server: SshServer) -> None:
    """End the server's open connections as a broken machine does; what was started in them goes on."""
    for pid in sessions_of(server):
        # Connections of earlier tests may end by themselves at any moment.
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().startswith("sshd"):
                os.kill(pid, signal.SIGKILL)


def new_lines(server: SshServer, before: str) -> str:
    """What sshd has logged of the connections that began since `before`, once all of them have ended; there is one.

    Earlier ones may end meanwhile: their lines are left out.
    """

    def ended() -> list[str]:
        lines = server.log()[len(before) :].splitlines()
        begun = {found[1] for line in lines if (found := re.match(r"Connection from \S+ port (\d+)", line))}
        over = {found[1] for line in lines if (found := re.match(_ENDED, line))}
        ours = [line for line in lines if not (found := re.search(r"port (\d+)", line)) or found[1] in begun]
        return ours if begun and begun <= over else []

    return "\n".join([*until(ended, said=lambda: server.log()[len(before) :]), ""])


def _children(parent: int) -> list[int]:
    """The processes that `parent` started, sessions of sshd among them."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            if int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]) == parent:
                found.append(int(folder.name))
    return found


def _write_files(folder: Path, port: int, options: str, bashrc: str) -> None:
    for name in ("host_ed25519", "identity"):
        if not (folder / name).exists():
            run_tool(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / name)])
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
