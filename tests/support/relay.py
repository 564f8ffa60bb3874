# SPDX-License-Identifier: Apache-2.0
"""A TCP relay in front of a server that stops passing bytes on, or hangs up, after a given number of them."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import TracebackType

from tests.support.ports import free_port


class Relay:
    """Accepts connections and passes them on to `port`; a context manager.

    `up` and `down` limit the bytes from and to the client, over all connections. When one limit is reached the relay
    either holds every byte back from then on, like a peer that has stalled, or (`drop`) closes both sides. With
    `listen` it takes the place of an earlier relay. With `late` it turns the first connection away, after so many
    seconds.
    """

    def __init__(
        self,
        port: int,
        *,
        up: int | None = None,
        down: int | None = None,
        drop: bool = False,
        listen: int = 0,
        late: float = 0.0,
    ) -> None:
        self._target = port
        self._left = {"up": up, "down": down}
        self._drop = drop
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._over = threading.Event()
        self._hung_up = False
        self._late = late
        self._listener = socket.create_server(("127.0.0.1", listen or free_port()))
        self.port: int = self._listener.getsockname()[1]
        self.passed = {"up": 0, "down": 0}

    def __enter__(self) -> Relay:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hang_up()
        self._close([self._listener])

    def hang_up(self) -> None:
        """Close every connection, and those that come later."""
        self._over.set()
        with self._lock:
            self._hung_up = True
            self._close(self._sockets)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                if self._late:
                    time.sleep(self._late)
                    client.close()
                    self._late = 0.0
                    continue
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            with self._lock:
                self._sockets += [client, server]
                if self._hung_up:
                    self._close([client, server])
            for name, source, sink in (("up", client, server), ("down", server, client)):
                threading.Thread(target=self._pump, args=(name, source, sink), daemon=True).start()

    def _pump(self, name: str, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                allowed = self._allow(name, len(data))
                sink.sendall(data[:allowed])
                if allowed < len(data):
                    self._over.set()
                    break
            # A stalled network does not pass on that a side hung up either.
            if self._drop or not self._over.is_set():
                self._close([source, sink])

    def _allow(self, name: str, size: int) -> int:
        with self._lock:
            left = self._left[name]
            if self._over.is_set():
                return 0
            allowed = size if left is None else min(size, left)
            self._left[name] = None if left is None else left - allowed
            self.passed[name] += allowed
            return allowed

    def _close(self, sockets: list[socket.socket]) -> None:
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
