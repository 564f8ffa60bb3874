# SPDX-License-Identifier: Apache-2.0
"""Processes that have imported a site's SGLang already and fork a job when one is asked for.

Importing SGLang takes some seven seconds in each of an engine's three processes; most tests ask what an engine decodes,
not how it starts. Engines whose environment differs at import start as SGLang starts them: see `harness.decode`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path


SERVER = Path(__file__).with_name("warm_server.py")
#: Processes that stay while others are used: an imported SGLang takes some 600 MB.
KEPT = 3
START_TIMEOUT = 900


class WarmError(Exception):
    """A process did not get as far as taking jobs; the text is the end of what it said."""


class Warm:
    """One process: an interpreter with one SGLang in it.

    Args:
        python: The interpreter.
        environment: All of its environment variables.
    """

    def __init__(self, python: Path, environment: Mapping[str, str]) -> None:
        self.users = 0
        self._folder = Path(tempfile.mkdtemp(prefix="ddtree-warm-"))
        self._address = str(self._folder / "door")
        with (self._folder / "log.txt").open("w") as log:
            self._process = subprocess.Popen(
                [python, SERVER, self._address],
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._starting = threading.Lock()
        self._ready = False

    def run(self, words: Sequence[str], environment: Mapping[str, str], log: Path, timeout: float) -> int:
        """Run a script with its arguments in a fork, and return its exit status.

        Raises:
            subprocess.TimeoutExpired: After `timeout` seconds; the job is killed with all that it started.
            WarmError: The process never became ready.
        """
        self._wait()
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout)
            connection.connect(self._address)
            job = {"words": list(words), "environment": dict(environment), "log": str(log)}
            connection.sendall(json.dumps(job).encode() + b"\n")
            group: int | None = None
            with connection.makefile("r") as talk:
                try:
                    group = int(talk.readline())
                    return int(talk.readline())
                except TimeoutError:
                    raise subprocess.TimeoutExpired(list(words), timeout) from None
                finally:
                    if group is not None:
                        with contextlib.suppress(ProcessLookupError):
                            os.killpg(group, signal.SIGKILL)

    def _wait(self) -> None:
        with self._starting:
            if self._ready:
                return
            timer = threading.Timer(START_TIMEOUT, self._process.kill)
            timer.start()
            assert self._process.stdout
            self._ready = any(line == "ready\n" for line in self._process.stdout)
            timer.cancel()
            if not self._ready:
                said = (self._folder / "log.txt").read_text().splitlines()
                raise WarmError("\n".join(said[-40:]))

    def close(self) -> None:
        """End the process; jobs that still run end when they are done."""
        self._process.kill()
        self._process.communicate()
        shutil.rmtree(self._folder, ignore_errors=True)


_lock = threading.Lock()
_kept: dict[tuple[str, ...], Warm] = {}


def run(
    python: Path,
    site: Mapping[str, str],
    words: Sequence[str],
    *,
    environment: Mapping[str, str],
    log: Path,
    timeout: float,
) -> int:
    """`Warm.run` in the process of `python` and the environment `site`, started when there is none yet."""
    key = (str(python), *(f"{name}={value}" for name, value in sorted(site.items())))
    with _lock:
        warm = _kept.pop(key, None) or Warm(python, site)
        _kept[key] = warm  # the last one used is the last one here
        warm.users += 1
        idle = [other for other in _kept if not _kept[other].users]
        for other in idle[: max(0, len(_kept) - KEPT)]:
            _kept.pop(other).close()
    try:
        return warm.run(words, environment, log, timeout)
    finally:
        with _lock:
            warm.users -= 1


@atexit.register
def _close() -> None:
    for warm in _kept.values():
        warm.close()
