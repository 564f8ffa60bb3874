# SPDX-License-Identifier: Apache-2.0
"""TCP connections from a host, through SSH: to a server that listens on the host's own loopback device.

Each one ends in a socket pair of this process. A listening port, as `ssh -L` opens one, would let every user of this
machine in.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType

from ddtree_overlay.config import Host
from ddtree_overlay.errors import ConnectionFailedError
from ddtree_overlay.hosts.connect import abandon, connect
from ddtree_overlay.hosts.lean import paramiko


#: What RFC 4254 calls them (section 5.1).
_PROHIBITED, _CONNECT_FAILED = 1, 2
#: A broken connection is known to be broken after so long.
_ENDING_SECONDS = 0.3
_PIECE = 65536


class Tunnel:
    """An SSH connection that others are opened through; a context manager, connected when it is entered."""

    def __init__(self, host: Host, *, accept_new: bool = False) -> None:
        self._host = host
        self._accept_new = accept_new
        self._hops: list[paramiko.Transport] = []
        self.warnings: list[str] = []

    def dial(self, address: str, port: int, seconds: float) -> socket.socket:
        """A socket whose other end is at `address` and `port`, as the host sees them.

        Raises:
            ConnectionFailedError: The SSH connection is lost, or the host forwards nothing.
            ConnectionRefusedError: Nobody listens there.
            TimeoutError: The host has not connected after `seconds`.
        """
        place = f"{address} port {port}"
        try:
            channel = self._hops[-1].open_channel(
                "direct-tcpip", (address, port), ("127.0.0.1", 0), timeout=max(0.1, seconds)
            )
        except paramiko.ChannelException as e:
            if e.code == _CONNECT_FAILED:
                raise ConnectionRefusedError(None, f"{self._host.name} cannot connect to {place}") from e
            raise ConnectionFailedError(
                f"{self._host.name} does not forward to {place}",
                why=f"its SSH server says: {e.text}" + (" (AllowTcpForwarding)" if e.code == _PROHIBITED else ""),
                next_step="allow it in sshd_config, or name an address that this machine reaches with --url",
            ) from e
        except (paramiko.SSHException, OSError, EOFError) as e:
            if isinstance(e, TimeoutError) or "Timeout" in str(e):
                raise TimeoutError from e
            raise ConnectionFailedError(
                self._lost,
                why=str(e) or type(e).__name__,
                next_step="run the command again",
            ) from e
        near, far = socket.socketpair()
        threads = [(_to_channel, far, channel), (_from_channel, far, channel)]
        for pump, *ends in threads:
            threading.Thread(target=pump, args=ends, daemon=True).start()
        return near

    @property
    def _lost(self) -> str:
        return f"{self._host.name}: the SSH connection was lost"

    def fault(self) -> str:
        """Why what went through the tunnel broke off, or "" when the tunnel itself still stands."""
        for hop in self._hops:
            hop.join(_ENDING_SECONDS)  # its channels close a moment before it ends
            if not hop.is_alive():
                return self._lost
        return ""

    def __enter__(self) -> Tunnel:
        self._hops = connect(self._host, accept_new=self._accept_new, warnings=self.warnings)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Whoever interrupts does not wait for goodbyes.
        abandon(self._hops)


def _to_channel(far: socket.socket, channel: paramiko.Channel) -> None:
    with contextlib.suppress(paramiko.SSHException, OSError, EOFError):
        while data := far.recv(_PIECE):
            channel.sendall(data)
    # No HTTP client closes one direction only: who closes wants nothing more, and the server shall know.
    with contextlib.suppress(paramiko.SSHException, OSError, EOFError):
        channel.close()


def _from_channel(far: socket.socket, channel: paramiko.Channel) -> None:
    with contextlib.suppress(paramiko.SSHException, OSError, EOFError):
        while data := channel.recv(_PIECE):
            far.sendall(data)
    with contextlib.suppress(OSError):
        far.shutdown(socket.SHUT_RDWR)  # wakes the other pump
    with contextlib.suppress(paramiko.SSHException, OSError, EOFError):
        channel.close()
    far.close()
