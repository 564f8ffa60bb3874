# SPDX-License-Identifier: Apache-2.0
"""Lines about a long operation that the operator sees while it runs. Nobody has to be there to read them."""

from __future__ import annotations

import contextlib
import os
import time


class _Line:
    """Where the lines go: a descriptor and what each starts with, once `agent` or `standalone` has opened it."""

    fd = -1
    start = ""
    silent = b""


def open_line(fd: int, start: str, silent: bytes = b"") -> None:
    """Send what is told from now on to `fd`, each on a line of its own after `start`; `silent` says nothing there."""
    _Line.fd, _Line.start, _Line.silent = fd, start, silent


def deserted() -> bool:
    """Whether it is known that nobody listens any more."""
    try:
        os.write(_Line.fd, _Line.silent) if _Line.silent else None
    except OSError:
        return True
    return False


def tell(text: str) -> None:
    """Tell the operator `text`; that there is none any more changes nothing."""
    if _Line.fd >= 0:
        with contextlib.suppress(OSError):
            line = " ".join(text.split())
            os.write(_Line.fd, f"{_Line.start}{line[:500]}\n".encode())


class Waiting:
    """Tells what is waited for, with the seconds since `start`: each second at first, then less and less often."""

    def __init__(self, start: float) -> None:
        self.start = start
        self._next = 0.0

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start

    def tell(self, text: str) -> None:
        """Tell `text` if it is time to."""
        now = self.seconds
        if now >= self._next:
            self._next = now + max(1.0, now / 10)
            tell(f"{text} ({now:.0f} s)")
