# SPDX-License-Identifier: Apache-2.0
"""A verified and authenticated SSH connection. The host proves who it is before any credential is offered."""

from __future__ import annotations

import random
import socket
import time
from pathlib import Path

from ddtree_overlay.config import Host
from ddtree_overlay.errors import AuthenticationError, ConnectionFailedError, HostKeyError
from ddtree_overlay.hosts import hostkeys
from ddtree_overlay.hosts.credentials import credentials
from ddtree_overlay.hosts.hostkeys import Verdict
from ddtree_overlay.hosts.lean import paramiko
from ddtree_overlay.hosts.resolve import Endpoint, Hop, route


#: More offers than this, and a server with default settings hangs up.
MAX_OFFERS = 5
KEEPALIVE_SECONDS = 15
#: Before another attempt at a server that hung up without a word.
PAUSES = (0.3, 0.8, 1.5, 3.0)
#: A busy machine needs a moment to turn somebody away.
_AT_ONCE_SECONDS = 5.0


def connect(host: Host, *, accept_new: bool, warnings: list[str]) -> list[paramiko.Transport]:
    """Open a connection to `host`, through its jump hosts if it has any.

    Returns:
        The connections in the order they were opened; the last one is to `host`. Close them from the end.

    Raises:
        ConfigError: The ssh configuration cannot be used.
        ConnectionFailedError: The host cannot be reached, or does not speak SSH as we need it.
        HostKeyError: Its key is unknown, changed, revoked, or not the pinned one; nothing was offered to it.
        AuthenticationError: It refused every key.
    """
    opened: list[paramiko.Transport] = []
    try:
        for hop in route(host, warnings):
            _join(hop, accept_new, warnings, opened)
    except BaseException:
        abandon(opened)
        raise
    return opened


def abandon(opened: list[paramiko.Transport]) -> None:
    """Drop connections that may have stalled, from the outermost: the others would try to say goodbye through it."""
    while opened:
        opened.pop(0).close()


def _join(hop: Hop, accept_new: bool, warnings: list[str], opened: list[paramiko.Transport]) -> None:
    host, endpoint = hop.host, hop.endpoint
    known, said = hostkeys.load(endpoint.known_hosts)
    warnings += [w for w in said if w not in warnings]
    for pause in (*PAUSES, None):
        start = time.monotonic()
        sock = _through(host, endpoint, opened[-1]) if opened else _dial(host, endpoint)
        try:
            transport = paramiko.Transport(sock)
        except (paramiko.SSHException, OSError) as e:
            raise _no_ssh(host, endpoint, e) from e
        opened.append(transport)
        try:
            key = _negotiate(host, endpoint, transport, known)
        except ConnectionFailedError:
            # Not a word from it, and at once: a server with many others at its door (MaxStartups) turns some away.
            at_once = time.monotonic() - start < min(_AT_ONCE_SECONDS, host.timeout / 2)
            if pause is None or transport.remote_version or not at_once:
                raise
            opened.pop().close()
            # Those that were turned away together shall not come back together.
            time.sleep(pause * random.uniform(0.5, 1.5))  # noqa: S311
        else:
            break
    _verify(host, endpoint, key, known, accept_new=accept_new)
    _authenticate(host, endpoint, transport)
    transport.set_keepalive(KEEPALIVE_SECONDS)


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
            next_step=f"{_by_hand(endpoint)}; then check ProxyJump in the ssh configuration",
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
    for label, key in credentials(endpoint, host.timeout, notes):
        if len(tried) == MAX_OFFERS:
            notes.append(f"only the first {MAX_OFFERS} keys were offered; set IdentitiesOnly or identity_file")
            break
        tried.append(label)
        start = time.monotonic()
        try:
            if not transport.auth_publickey(endpoint.user, key):
                return
            notes.append("the host asks for a second factor")
        except paramiko.BadAuthenticationType as e:
            notes.append(f"the host accepts only {', '.join(e.allowed_types)}")
            break
        except (paramiko.SSHException, OSError, EOFError) as e:
            if time.monotonic() - start >= host.timeout:
                raise _no_ssh(host, endpoint, TimeoutError(f"no answer to {label} in {host.timeout:.0f} s")) from e
            if not isinstance(e, paramiko.AuthenticationException) or not transport.is_active():
                notes.append(str(e) or "the host hung up")
                break
    offered = ", ".join(tried) or "no key (none was found)"
    raise AuthenticationError(
        f"{host.name} refused {endpoint.user}@{endpoint.address} port {endpoint.port}",
        why="; ".join([f"offered: {offered}", *notes]),
        next_step="set `user` and `identity_file` in deploy.toml, or ssh-add the key",
    )
