# SPDX-License-Identifier: Apache-2.0
"""What every way of reaching a host has in common: one call of the agent, and how long it may take."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol

from ddtree_overlay.config import Host
from ddtree_overlay.errors import ConnectionFailedError
from ddtree_overlay.hosts import protocol
from ddtree_overlay.hosts.protocol import Output, Reply


__all__ = ["AgentTransport", "Reply", "Transport", "open_transport"]

#: No operation may take longer than this, even while it shows signs of life.
TOTAL_SECONDS = 1800.0
Tell = Callable[[str], None]
Watch = Callable[[bytearray], None]


class Transport(Protocol):
    """A host that the agent can be run on.

    `name` is the host's name for messages, `target` the option that selects it (`--host NAME`), `warnings` what the
    operator should hear about the connection.
    """

    name: str
    target: str
    warnings: list[str]

    @property
    def host(self) -> Host:
        """The host as deploy.toml describes it."""
        ...

    def call(
        self,
        op: str,
        args: Mapping[str, Any],
        payload: bytes = b"",
        *,
        timeout: float | None = None,
        total: float = TOTAL_SECONDS,
        progress: Tell | None = None,
    ) -> Reply:
        """Run one operation.

        `timeout` is the number of seconds without any progress (default: the host's), `total` with it, once the lock of
        the host is had; `progress` is told what the agent says meanwhile.
        """
        ...

    def close(self) -> None:
        """Drop the connection."""
        ...


class AgentTransport:
    """A transport that only lacks the way to run the interpreter (`_run`)."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.name = host.name
        self.target = f"--root {shlex.quote(host.root)}" if host.root else f"--host {host.name}"
        self.warnings: list[str] = []

    @property
    def host(self) -> Host:
        """The host as deploy.toml describes it."""
        return self._host

    def call(
        self,
        op: str,
        args: Mapping[str, Any],
        payload: bytes = b"",
        *,
        timeout: float | None = None,
        total: float = TOTAL_SECONDS,
        progress: Tell | None = None,
    ) -> Reply:
        """Run one operation of the agent; see `Transport.call`.

        Raises:
            ConnectionFailedError: No connection, no progress for `timeout` seconds, or it ended without an answer.
            OverlayError: The agent refused, as the class that fits.
        """
        sentinel = protocol.new_sentinel()
        full = {**args, "root": self.host.root} if self.host.root else args
        patience = self.host.timeout if timeout is None else timeout
        request = protocol.encode(op, full, payload, patience)
        watch = protocol.Progress(sentinel, progress or (lambda _: None))
        changes = op in protocol.MUTATING
        # While it waits for the lock of the host it shows signs of life.
        longest = total + float(args.get("lock_wait", 0))
        output = self._run(sentinel, request, patience, changes=changes, total=longest, watch=watch)
        answer = protocol.decode(output, sentinel)
        if answer is None:
            raise protocol.missing_answer(output, sentinel, self._command(), self.name, self.target, changes=changes)
        self._listen(protocol.noise(output, sentinel))
        return protocol.unwrap(*answer, self.target)

    def _run(
        self, sentinel: str, request: bytes, timeout: float, *, changes: bool, total: float, watch: Watch
    ) -> Output:
        """Run the interpreter once, for `total` seconds at most.

        `changes` says that it must not be stopped half-way; `watch` is shown what has arrived, again and again.
        """
        raise NotImplementedError

    def _python(self) -> str:
        return self.host.python

    def _command(self) -> str:
        """What is run, for messages."""
        return shlex.join([*self.host.exec_prefix, self._python()])

    def _listen(self, noise: str) -> None:
        if noise:
            first = noise.splitlines()[0][:60]
            warning = f"a start-up file of the login shell prints {first!r} (see ~/.bashrc); ignored"
            if warning not in self.warnings:
                self.warnings.append(warning)

    def _no_progress(self, timeout: float, *, changes: bool) -> ConnectionFailedError:
        return ConnectionFailedError(
            f"{self.name}: no sign of life for {timeout:.0f} s",
            why="the network, the host or the agent has stalled" + (f"; {protocol.FATE}" if changes else ""),
            next_step=f"ddtree-overlay status {self.target}  # or raise `timeout` in deploy.toml",
        )

    def close(self) -> None:
        """Drop the connection, if one is open."""

    def __enter__(self) -> AgentTransport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_transport(host: Host, *, accept_new: bool = False) -> AgentTransport:
    """The transport that `host` asks for; it connects at the first call. Use it as a context manager.

    Args:
        host: A host of `deploy.toml`, or one with `root` set.
        accept_new: Add an unknown host key to known_hosts instead of refusing; a changed key is refused all the same.
    """
    if host.transport == "local" or host.root:
        from ddtree_overlay.hosts.local import LocalTransport

        return LocalTransport(host)
    from ddtree_overlay.hosts.ssh import SshTransport

    return SshTransport(host, accept_new=accept_new)
