# SPDX-License-Identifier: Apache-2.0
"""From a name to an address, port, user and keys, as OpenSSH itself would read the user's configuration."""

from __future__ import annotations

import getpass
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ddtree_overlay.config import Host
from ddtree_overlay.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where to connect and with which keys. `key_name` is the name that known_hosts uses for the host."""

    address: str
    port: int
    user: str
    identities: tuple[Path, ...]
    identities_only: bool
    known_hosts: tuple[Path, ...]
    key_name: str
    jump: str = ""


def resolve(host: Host, warnings: list[str]) -> Endpoint:
    """Resolve `host`, with `ssh -G` where there is an ssh: Include, Match and tokens then mean what they always mean.

    Raises:
        ConfigError: The ssh configuration cannot be read, or asks for a ProxyCommand.
    """
    options = _ask_ssh(host) if shutil.which("ssh") else _ask_paramiko(host, warnings)
    command = options.get("proxycommand", ["none"])[0]
    if command != "none":
        raise ConfigError(
            f"{host.name}: ProxyCommand is not supported ({command})",
            next_step="use ProxyJump in the ssh configuration instead",
        )
    jump = options.get("proxyjump", ["none"])[0]
    given = host.identity_file
    identities = [given] if given else options.get("identityfile", [])
    known = [host.known_hosts] if host.known_hosts else _files(options, "userknownhostsfile", "globalknownhostsfile")
    address = options.get("hostname", [host.address])[0]
    alias = options.get("hostkeyalias", ["none"])[0]
    return Endpoint(
        address=address,
        port=host.port or int(options.get("port", ["22"])[0]),
        user=host.user or options.get("user", [getpass.getuser()])[0],
        identities=tuple(Path(i).expanduser() for i in identities if i != "none"),
        identities_only=bool(given) or options.get("identitiesonly", ["no"])[0] == "yes",
        known_hosts=tuple(Path(k).expanduser() for k in known if k not in ("none", "/dev/null")),
        key_name="" if alias == "none" else alias,
        jump="" if jump == "none" else jump,
    )


def _files(options: dict[str, list[str]], *keys: str) -> list[str]:
    return [name for key in keys for value in options.get(key, []) for name in value.split()]


def _ask_ssh(host: Host) -> dict[str, list[str]]:
    words = ["ssh", "-G"]
    if host.ssh_config:
        words += ["-F", str(Path(host.ssh_config).expanduser())]
    if host.port:
        words += ["-p", str(host.port)]
    if host.user:
        words += ["-l", host.user]
    words += ["--", host.address]
    try:
        done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as e:
        raise ConfigError(
            f"{host.name}: ssh -G did not answer in 30 s", next_step="look for a Match exec that hangs"
        ) from e
    if done.returncode:
        raise ConfigError(
            f"{host.name}: the ssh configuration cannot be used", why=done.stderr.strip(), next_step=" ".join(words)
        )
    options: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition(" ")
        options.setdefault(key.lower(), []).append(value)
    return options


def _ask_paramiko(host: Host, warnings: list[str]) -> dict[str, list[str]]:
    """Without an ssh binary: paramiko's own reader, which knows no Include."""
    import paramiko

    path = Path(host.ssh_config or "~/.ssh/config").expanduser()
    options: dict[str, list[str]] = {
        "identityfile": [f"~/.ssh/id_{kind}" for kind in ("ed25519", "ecdsa", "rsa")],
        "userknownhostsfile": ["~/.ssh/known_hosts"],
        "globalknownhostsfile": ["/etc/ssh/ssh_known_hosts"],
    }
    if path.is_file():
        text = path.read_text("utf-8", "replace")
        if any(line.split()[:1] == ["include"] for line in text.lower().splitlines()):
            warnings.append(f"{path}: Include is ignored, because there is no ssh binary on this machine to resolve it")
        found = paramiko.SSHConfig.from_text(text).lookup(host.address)
        options.update({k: v if isinstance(v, list) else [str(v)] for k, v in found.items()})
    return options
