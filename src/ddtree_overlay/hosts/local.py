# SPDX-License-Identifier: Apache-2.0
"""The agent in a subprocess of this machine."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time

from ddtree_overlay.hosts.protocol import BOOTSTRAP, Output, cannot_start, complete
from ddtree_overlay.hosts.transport import AgentTransport, Watch


class _StalledError(Exception):
    """Nothing moved for too long."""


class LocalTransport(AgentTransport):
    """Runs the interpreter here, as the same user."""

    def _python(self) -> str:
        # A package folder has no interpreter of its own unless one is named; any Python can read files.
        default = self.host.root and self.host.python == "python3"
        return sys.executable if default else os.path.expanduser(self.host.python)

    def _run(
        self, sentinel: str, request: bytes, timeout: float, *, changes: bool, total: float, watch: Watch
    ) -> Output:
        try:
            child = subprocess.Popen(
                [*self.host.exec_prefix, self._python(), "-c", BOOTSTRAP, sentinel],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd="/",
                # Ctrl-C at the terminal must not reach an agent that is swapping files.
                start_new_session=True,
            )
        except OSError as e:
            raise cannot_start(self._command(), self.name, self.target, e.strerror or str(e)) from e
        try:
            return self._exchange(child, sentinel, request, timeout, total=total, watch=watch)
        except _StalledError as e:
            raise self._no_progress(timeout, changes=changes) from e
        finally:
            # An agent that swaps files is left to finish; nobody waits for what another one would find.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if child.poll() is None and not changes:
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait()
            for stream in (child.stdin, child.stdout, child.stderr):
                if stream:
                    with contextlib.suppress(OSError):
                        stream.close()

    def _exchange(
        self,
        child: subprocess.Popen[bytes],
        sentinel: str,
        request: bytes,
        timeout: float,
        *,
        total: float,
        watch: Watch,
    ) -> Output:
        """Send and receive at the same time, so that neither side waits for the other with a full pipe.

        Ends with the answer: a process that was started on the side may keep the streams open for longer.
        """
        assert child.stdin
        assert child.stdout
        assert child.stderr
        out, error, sent = bytearray(), bytearray(), 0
        end = time.monotonic() + total
        os.set_blocking(child.stdin.fileno(), False)
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdin, selectors.EVENT_WRITE)
            selector.register(child.stdout, selectors.EVENT_READ, out)
            selector.register(child.stderr, selectors.EVENT_READ, error)
            while selector.get_map() and not complete(out, sentinel):
                ready = selector.select(min(timeout, end - time.monotonic()))
                if not ready:
                    raise _StalledError
                for key, _ in ready:
                    if key.fileobj is child.stdin:
                        sent = self._feed(child, selector, request, sent)
                        continue
                    data = os.read(key.fd, 65536)
                    key.data.extend(data)
                    if not data:
                        selector.unregister(key.fileobj)
                watch(out)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=timeout)
        return Output(bytes(out), bytes(error), child.poll())

    def _feed(self, child: subprocess.Popen[bytes], selector: selectors.BaseSelector, request: bytes, sent: int) -> int:
        assert child.stdin
        try:
            sent += os.write(child.stdin.fileno(), request[sent : sent + 65536])
        except BrokenPipeError:
            sent = len(request)
        if sent >= len(request):
            selector.unregister(child.stdin)
            child.stdin.close()
        return sent
