# SPDX-License-Identifier: Apache-2.0
"""From a name to an address, port, user and keys, as OpenSSH itself would read the user's configuration."""

from __future__ import annotations

import getpass
import shutil
import subprocess
from dataclasses import dataclass, replace
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
    agent: str = ""


@dataclass(frozen=True, slots=True)
class Hop:
    """One connection on the way to a host: whose it is, for messages and the timeout, and where it goes."""

    host: Host
    endpoint: Endpoint


def route(host: Host, warnings: list[str]) -> list[Hop]:
    """The connections to open one through the other, the nearest first; the last one is to `host` itself.

    Each jump host is resolved like a host of its own, with its user, port, keys and jump host; in a list of jump hosts
    the list counts, as for `ssh -J`. What deploy.toml says about keys and pins is about `host` only.

    Raises:
        ConfigError: The ssh configuration cannot be read, asks for a ProxyCommand, or jumps in a circle.
    """
    hops = [Hop(host, resolve(host, warnings))]
    rest = hops[0].endpoint.jump
    while rest:
        rest, _, last = rest.rpartition(",")
        before = _jump_host(host, last)
        hop = Hop(before, resolve(before, warnings))
        places = [(h.endpoint.address, h.endpoint.port) for h in (hop, *hops)]
        hops.insert(0, hop)
        if places[0] in places[1:]:
            way = " -> ".join(f"{address} port {port}" for address, port in places)
            raise ConfigError(
                f"{host.name}: its jump hosts form a circle",
                why=way,
                next_step=f"correct ProxyJump in the ssh configuration: ssh -G {host.address} | grep -i proxyjump",
            )
        rest = rest or hop.endpoint.jump
    return hops


def _jump_host(host: Host, jump: str) -> Host:
    """The jump host that `[ssh://][user@]address[:port]` names."""
    user, _, place = jump.strip().removeprefix("ssh://").rstrip("/").rpartition("@")
    address, _, port = place.rpartition(":")
    if not port.isdigit() or (":" in address and not address.endswith("]")):
        address, port = place, ""  # no port, or an IPv6 address without brackets
    return replace(
        host,
        name=f"{host.name} (through {place})",
        address=address.strip("[]"),
        port=int(port) if port else None,
        user=user or None,
        identity_file=None,
        host_key_fingerprint=None,
    )


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
        agent=options.get("identityagent", [""])[0],
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
    from ddtree_overlay.hosts.lean import paramiko

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
