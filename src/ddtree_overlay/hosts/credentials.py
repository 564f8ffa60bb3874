# SPDX-License-Identifier: Apache-2.0
"""Which keys are offered to a host that has proven who it is, and in which order."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from ddtree_overlay.hosts import hostkeys
from ddtree_overlay.hosts.lean import paramiko
from ddtree_overlay.hosts.resolve import Endpoint


class _Agent(paramiko.agent.AgentSSH):
    """The ssh agent at a socket. paramiko's own class knows only the environment, and waits for ever."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__()
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(timeout)
        sock.connect(path)
        self._connect(sock)  # type: ignore[attr-defined]


def credentials(endpoint: Endpoint, timeout: float, notes: list[str]) -> Iterator[tuple[str, paramiko.PKey]]:
    """Keys to offer, each with its name: the configured ones, then, unless IdentitiesOnly is set, those of the agent.

    A configured key that the ssh agent holds is taken from there, so a passphrase is no obstacle. Why a key was left
    out is added to `notes`.
    """
    held = _agent_keys(endpoint.agent, timeout, notes)
    used: set[bytes] = set()
    for path in endpoint.identities:
        public = _public_blob(path)
        if public in used:
            continue
        from_agent = held.get(public) if public else None
        key = from_agent or _private_key(path, notes)
        if key and key.asbytes() not in used:
            used.add(key.asbytes())
            yield f"{path} (ssh agent)" if from_agent else str(path), key
    if not endpoint.identities_only:
        for blob, key in held.items():
            if blob not in used:
                yield f"ssh agent {hostkeys.fingerprint(blob)}", key


def _agent_keys(setting: str, timeout: float, notes: list[str]) -> dict[bytes, paramiko.PKey]:
    path = os.environ.get("SSH_AUTH_SOCK", "") if setting in ("", "SSH_AUTH_SOCK") else setting
    if not path or path == "none":
        return {}
    try:
        return {k.asbytes(): k for k in _Agent(os.path.expanduser(path), timeout).get_keys()}
    except (paramiko.SSHException, OSError) as e:
        notes.append(f"the ssh agent does not answer: {e}")
        return {}


def _public_blob(path: Path) -> bytes | None:
    """The key in `path`.pub; IdentityFile may also name that file itself, when only the agent has the private half."""
    public = path if path.suffix == ".pub" else path.with_name(path.name + ".pub")
    with contextlib.suppress(OSError):
        keys, _ = hostkeys.parse("x " + public.read_text("utf-8", "replace"), str(public))
        return keys[0].blob if keys else None
    return None


def _private_key(path: Path, notes: list[str]) -> paramiko.PKey | None:
    if path.suffix == ".pub":
        notes.append(f"{path}: the ssh agent does not hold this key")
        return None
    try:
        return paramiko.PKey.from_path(path)
    except FileNotFoundError:
        return None
    except Exception as e:  # the reader lets errors of several crypto libraries through
        locked = isinstance(e, paramiko.PasswordRequiredException) or "password" in str(e)
        notes.append(f"{path} has a passphrase: ssh-add it" if locked else f"{path} cannot be used: {e}")
    return None
