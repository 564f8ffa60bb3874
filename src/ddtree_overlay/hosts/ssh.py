# SPDX-License-Identifier: Apache-2.0
"""The agent over SSH: one channel a call, both streams drained, a deadline on everything."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Sequence

from ddtree_overlay.config import Host
from ddtree_overlay.errors import ConnectionFailedError
from ddtree_overlay.hosts.connect import abandon, connect
from ddtree_overlay.hosts.lean import paramiko
from ddtree_overlay.hosts.protocol import BOOTSTRAP, Output, complete
from ddtree_overlay.hosts.transport import AgentTransport, Watch


class SshTransport(AgentTransport):
    """Connects at the first call and keeps the connection for the next ones."""

    def __init__(self, host: Host, *, accept_new: bool = False) -> None:
        super().__init__(host)
        self._accept_new = accept_new
        self._hops: list[paramiko.Transport] = []

    def _run(
        self, sentinel: str, request: bytes, timeout: float, *, changes: bool, total: float, watch: Watch
    ) -> Output:
        if not self._hops or not self._hops[-1].is_active():
            abandon(self._hops)
            self._hops = connect(self.host, accept_new=self._accept_new, warnings=self.warnings)
        start = time.monotonic()
        try:
            channel = self._hops[-1].open_session(timeout=timeout)
            channel.settimeout(timeout)
            _ask(channel, command_line(self.host.exec_prefix, self.host.python, sentinel), timeout)
            # From here on `_Exchange` watches the clock: progress in one direction is enough.
            channel.settimeout(None)
            output = _Exchange(channel, sentinel, request).run(timeout, total, watch)
            channel.close()
            return output
        except TimeoutError as e:
            # A stalled peer will not answer a second call either.
            abandon(self._hops)
            raise self._no_progress(timeout, changes=changes) from e
        except (paramiko.SSHException, OSError, EOFError) as e:
            abandon(self._hops)
            if time.monotonic() - start >= timeout:
                raise self._no_progress(timeout, changes=changes) from e
            raise self._lost(e) from e
        except BaseException:
            abandon(self._hops)
            raise

    def _lost(self, e: Exception) -> ConnectionFailedError:
        return ConnectionFailedError(
            f"{self.name}: the connection was lost",
            why=str(e) or type(e).__name__,
            next_step=f"ddtree-overlay status {self.target}",
        )

    def close(self) -> None:
        """Close the connection and its jump hosts, the last one first."""
        while self._hops:
            self._hops.pop().close()


def command_line(prefix: Sequence[str], python: str, sentinel: str) -> str:
    """What the login shell is asked to run. A leading `~/` of `python` is left to that shell to expand."""
    program = f'"$HOME"/{shlex.quote(python[2:])}' if python.startswith("~/") else shlex.quote(python)
    return f"exec {shlex.join(prefix)} {program} -c {shlex.quote(BOOTSTRAP)} {sentinel}"


def _ask(channel: paramiko.Channel, command: str, timeout: float) -> None:
    """Have `command` started; paramiko would wait for the answer without end.

    Raises:
        TimeoutError: The other side has not answered after `timeout` seconds.
    """
    failed: list[Exception] = []

    def ask() -> None:
        try:
            channel.exec_command(command)
        except Exception as e:
            failed.append(e)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout)
    if thread.is_alive():
        raise TimeoutError
    if failed:
        raise failed[0]


class _Exchange:
    """Sends the request and drains both streams at once; neither can block the other."""

    def __init__(self, channel: paramiko.Channel, sentinel: str, request: bytes) -> None:
        self._channel = channel
        self._sentinel = sentinel
        self._request = request
        self._streams: dict[str, bytearray] = {"out": bytearray(), "err": bytearray()}
        self._last_sign = time.monotonic()
        self._news = threading.Event()

    def run(self, timeout: float, total: float, watch: Watch) -> Output:
        """Run until the answer is complete or both streams have ended.

        Raises:
            TimeoutError: Nothing moved in either direction for `timeout` seconds, or it took longer than `total`.
        """
        threads = [
            threading.Thread(target=self._send, daemon=True),
            threading.Thread(target=self._drain, args=("err", self._channel.recv_stderr), daemon=True),
            threading.Thread(target=self._drain, args=("out", self._channel.recv), daemon=True),
        ]
        for thread in threads:
            thread.start()
        end = time.monotonic() + total
        while not complete(self._streams["out"], self._sentinel) and any(t.is_alive() for t in threads[1:]):
            if time.monotonic() > min(self._last_sign + timeout, end):
                raise TimeoutError
            self._news.wait(0.05)
            self._news.clear()
            watch(self._streams["out"])
        code = None if complete(self._streams["out"], self._sentinel) else self._exit_status(timeout)
        return Output(bytes(self._streams["out"]), bytes(self._streams["err"]), code)

    def _send(self) -> None:
        at = 0
        try:
            while at < len(self._request):
                sent = self._channel.send(self._request[at : at + 32768])
                if not sent:
                    return
                at += sent
                self._last_sign = time.monotonic()
            self._channel.shutdown_write()
        except (paramiko.SSHException, OSError, EOFError):
            # The other side ended before it had read everything; what it said explains why.
            return

    def _drain(self, name: str, receive: object) -> None:
        assert callable(receive)
        try:
            while data := receive(65536):
                self._streams[name].extend(data)
                self._last_sign = time.monotonic()
                self._news.set()
        except (paramiko.SSHException, OSError, EOFError):
            return
        finally:
            self._news.set()

    def _exit_status(self, timeout: float) -> int | None:
        """The exit status, or None when the process was killed or the connection lost."""
        if not self._channel.status_event.wait(min(timeout, 5.0)):
            return None
        status = self._channel.recv_exit_status()
        return None if status < 0 else status
