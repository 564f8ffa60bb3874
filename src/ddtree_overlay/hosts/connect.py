# SPDX-License-Identifier: Apache-2.0
"""A verified and authenticated SSH connection. The host proves who it is before any credential is offered."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import paramiko

from ddtree_overlay.config import Host
from ddtree_overlay.errors import AuthenticationError, ConfigError, ConnectionFailedError, HostKeyError
from ddtree_overlay.hosts import hostkeys
from ddtree_overlay.hosts.hostkeys import Verdict
from ddtree_overlay.hosts.resolve import Endpoint, resolve


#: More offers than this, and a server with default settings hangs up.
MAX_OFFERS = 5
MAX_HOPS = 8
KEEPALIVE_SECONDS = 15


def connect(host: Host, *, accept_new: bool, warnings: list[str]) -> list[paramiko.Transport]:
    """Open a connection to `host`, through its jump hosts if it has any.

    Returns:
        The connections in the order they were opened; the last one is to `host`. Close them from the end.

    Raises:
        ConnectionFailedError: The host cannot be reached, or does not speak SSH as we need it.
        HostKeyError: Its key is unknown, changed, revoked, or not the pinned one; nothing was offered to it.
        AuthenticationError: It refused every key.
    """
    opened: list[paramiko.Transport] = []
    try:
        _connect(host, resolve(host, warnings), accept_new, warnings, opened)
    except BaseException:
        for transport in reversed(opened):
            transport.close()
        raise
    return opened


def _connect(
    host: Host, endpoint: Endpoint, accept_new: bool, warnings: list[str], opened: list[paramiko.Transport]
) -> None:
    if len(opened) > MAX_HOPS:
        raise ConfigError(f"{host.name}: more than {MAX_HOPS} jump hosts", next_step="look for a loop of ProxyJump")
    if endpoint.jump:
        hop, rest = _hop(host, endpoint.jump)
        before = resolve(hop, warnings)
        _connect(hop, replace(before, jump=rest or before.jump), accept_new, warnings, opened)
    sock = _through(host, endpoint, opened[-1]) if endpoint.jump else _dial(host, endpoint)
    try:
        transport = paramiko.Transport(sock)
    except (paramiko.SSHException, OSError) as e:
        raise _no_ssh(host, endpoint, e) from e
    opened.append(transport)
    known, said = hostkeys.load(endpoint.known_hosts)
    warnings += [w for w in said if w not in warnings]
    key = _negotiate(host, endpoint, transport, known)
    _verify(host, endpoint, key, known, accept_new=accept_new)
    _authenticate(host, endpoint, transport)
    transport.set_keepalive(KEEPALIVE_SECONDS)


def _hop(host: Host, jump: str) -> tuple[Host, str]:
    """The jump host right before `host`, and the jump hosts before that one."""
    rest, _, last = jump.rpartition(",")
    user, _, place = last.removeprefix("ssh://").rpartition("@")
    address, _, port = place.rpartition(":") if place.rpartition(":")[2].isdigit() else (place, "", "")
    hop = replace(
        host,
        name=f"{host.name} (through {place})",
        address=address.strip("[]"),
        port=int(port) if port else None,
        user=user or None,
        identity_file=None,
        host_key_fingerprint=None,
    )
    return hop, rest


def _dial(host: Host, endpoint: Endpoint) -> socket.socket:
    try:
        return socket.create_connection((endpoint.address, endpoint.port), timeout=host.timeout)
    except OSError as e:
        reason = "no answer in time" if isinstance(e, TimeoutError) else e.strerror or str(e)
        raise ConnectionFailedError(
            f"{host.name} cannot be reached at {endpoint.address} port {endpoint.port}: {reason}",
            next_step=f"{_by_hand(endpoint)}; then check address and port in deploy.toml",
        ) from e


def _by_hand(endpoint: Endpoint) -> str:
    return f"ssh -p {endpoint.port} {endpoint.user}@{endpoint.address} true"


def _through(host: Host, endpoint: Endpoint, jump: paramiko.Transport) -> paramiko.Channel:
    try:
        return jump.open_channel(
            "direct-tcpip", (endpoint.address, endpoint.port), ("127.0.0.1", 0), timeout=host.timeout
        )
    except (paramiko.SSHException, OSError, EOFError) as e:
        raise ConnectionFailedError(
            f"{host.name}: the jump host cannot reach {endpoint.address} port {endpoint.port}: {e}",
            next_step=f"ssh {host.address} true; then check ProxyJump in the ssh configuration",
        ) from e


def _negotiate(
    host: Host, endpoint: Endpoint, transport: paramiko.Transport, known: list[hostkeys.KnownKey]
) -> paramiko.PKey:
    """Agree on keys with the other side; gives its host key, which nobody has looked at yet."""
    transport.banner_timeout = transport.handshake_timeout = transport.auth_timeout = host.timeout
    transport.channel_timeout = host.timeout
    options = transport.get_security_options()
    mine = {k.key_type for k in hostkeys.matching(known, _key_name(endpoint)) if not k.revoked}
    # Ask for a key of a type that is known, as OpenSSH does: a host has several.
    options.key_types = sorted(options.key_types, key=lambda t: _key_type(t) not in mine)
    try:
        transport.start_client(timeout=host.timeout)
        # After a timeout `start_client` returns as if all were well; then there is no key to be had.
        return transport.get_remote_server_key()
    except (paramiko.SSHException, OSError, EOFError) as e:
        raise _no_ssh(host, endpoint, e) from e


def _key_type(algorithm: str) -> str:
    """The type of key behind a signature algorithm: RSA keys sign under several names."""
    return "ssh-rsa" if algorithm.startswith("rsa-sha2-") else algorithm


def _no_ssh(host: Host, endpoint: Endpoint, e: Exception) -> ConnectionFailedError:
    where = f"{endpoint.address} port {endpoint.port}"
    if isinstance(e, paramiko.ssh_exception.IncompatiblePeer):
        return ConnectionFailedError(
            f"{host.name}: no common algorithms with the SSH server at {where}: {e}",
            why="a server that offers only SHA-1 signatures or key exchange is not supported any more",
            next_step="update the SSH server of the host, or give it an Ed25519 host key",
        )
    return ConnectionFailedError(
        f"{host.name}: no SSH connection with {where}",
        why=str(e) or "it hung up or did not answer in time",
        next_step=f"ssh -v -p {endpoint.port} {endpoint.user}@{endpoint.address} true",
    )


def _key_name(endpoint: Endpoint) -> str:
    return endpoint.key_name or hostkeys.lookup_name(endpoint.address, endpoint.port)


def _verify(
    host: Host, endpoint: Endpoint, key: paramiko.PKey, known: list[hostkeys.KnownKey], *, accept_new: bool
) -> None:
    name, blob = _key_name(endpoint), key.asbytes()
    seen = f"{host.name} ({endpoint.address} port {endpoint.port}, {key.get_name()}, {hostkeys.fingerprint(blob)})"
    verdict, line = hostkeys.judge(known, name, blob)
    if verdict is Verdict.REVOKED and line:
        raise HostKeyError(
            f"the host key is revoked: {seen}",
            why=f"{line.file}:{line.line} marks it @revoked",
            next_step="do not connect; ask the administrator of the host",
        )
    if host.host_key_fingerprint:
        _check_pin(host, blob, seen)
        return
    if verdict is Verdict.CHANGED and line:
        raise HostKeyError(
            f"the host key has changed: {seen}",
            why=f"{line.file}:{line.line} has {hostkeys.fingerprint(line.blob)}; somebody may be in the middle",
            next_step=f"if the host was reinstalled: ssh-keygen -R '{name}' -f {line.file}, then connect with ssh once",
        )
    if verdict is Verdict.UNKNOWN:
        _meet(endpoint, key, seen, accept_new=accept_new)


def _check_pin(host: Host, blob: bytes, seen: str) -> None:
    if hostkeys.fingerprint(blob) != str(host.host_key_fingerprint).rstrip("="):
        raise HostKeyError(
            f"the host key is not the pinned one: {seen}",
            why=f"deploy.toml has host_key_fingerprint = {host.host_key_fingerprint!r}",
            next_step="compare with `ssh-keygen -lf` on the host; correct host_key_fingerprint only if it is right",
        )


def _meet(endpoint: Endpoint, key: paramiko.PKey, seen: str, *, accept_new: bool) -> None:
    files: tuple[Path, ...] = endpoint.known_hosts or (Path("~/.ssh/known_hosts").expanduser(),)
    if accept_new:
        hostkeys.remember(files[0], _key_name(endpoint), key.get_name(), key.asbytes())
        return
    raise HostKeyError(
        f"the host key is unknown: {seen}",
        why=f"{_key_name(endpoint)} is not in {', '.join(str(f) for f in files)}; no credential was offered",
        next_step=(
            f"compare the fingerprint with `ssh-keygen -lf` on the host, then run the command again with --accept-new, "
            f"or {_by_hand(endpoint)}"
        ),
    )


def _authenticate(host: Host, endpoint: Endpoint, transport: paramiko.Transport) -> None:
    tried: list[str] = []
    notes: list[str] = []
    for label, key in _credentials(endpoint, notes):
        if len(tried) == MAX_OFFERS:
            notes.append(f"only the first {MAX_OFFERS} keys were offered")
            break
        tried.append(label)
        try:
            if not transport.auth_publickey(endpoint.user, key):
                return
            notes.append("the host asks for a second factor")
        except paramiko.BadAuthenticationType as e:
            notes.append(f"the host accepts only {', '.join(e.allowed_types)}")
            break
        except paramiko.AuthenticationException as e:
            if not transport.is_active():
                notes.append(str(e) or "the host hung up")
                break
        except (paramiko.SSHException, OSError, EOFError) as e:
            notes.append(str(e) or "the host hung up")
            break
    offered = ", ".join(tried) or "no key (none was found)"
    raise AuthenticationError(
        f"{host.name} refused {endpoint.user}@{endpoint.address} port {endpoint.port}",
        why="; ".join([f"offered: {offered}", *notes]),
        next_step="set `user` and `identity_file` in deploy.toml, or ssh-add the key",
    )


def _credentials(endpoint: Endpoint, notes: list[str]) -> Iterator[tuple[str, paramiko.PKey]]:
    """Keys to offer: configured files (or the same keys in the ssh agent), then the other keys of the ssh agent."""
    agent = _agent_keys(notes)
    used: set[bytes] = set()
    for path in endpoint.identities:
        public = _public_blob(path)
        held = agent.get(public) if public else None
        if held:
            used.add(held.asbytes())
            yield f"{path} (ssh agent)", held
            continue
        key = _private_key(path, notes)
        if key and key.asbytes() not in used:
            used.add(key.asbytes())
            yield str(path), key
    if not endpoint.identities_only:
        for blob, held in agent.items():
            if blob not in used:
                yield f"ssh agent {hostkeys.fingerprint(blob)}", held


def _agent_keys(notes: list[str]) -> dict[bytes, paramiko.PKey]:
    try:
        return {k.asbytes(): k for k in paramiko.Agent().get_keys()}
    except (paramiko.SSHException, OSError) as e:
        notes.append(f"the ssh agent does not answer: {e}")
        return {}


def _public_blob(path: Path) -> bytes | None:
    with contextlib.suppress(OSError):
        keys, _ = hostkeys.parse("x " + path.with_name(path.name + ".pub").read_text("utf-8", "replace"), str(path))
        return keys[0].blob if keys else None
    return None


def _private_key(path: Path, notes: list[str]) -> paramiko.PKey | None:
    try:
        return paramiko.PKey.from_path(path)
    except FileNotFoundError:
        return None
    except Exception as e:  # the reader lets errors of several crypto libraries through
        locked = isinstance(e, paramiko.PasswordRequiredException) or "password" in str(e)
        notes.append(f"{path} has a passphrase: ssh-add it" if locked else f"{path} cannot be used: {e}")
    return None
