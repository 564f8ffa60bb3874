# SPDX-License-Identifier: Apache-2.0
"""The restart command or systemd unit of a host, run with an end to it."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

from .common import Refusal
from .processes import without_secrets


Trial = dict[str, Any]
#: The output of a restart, beside the history: a server that a command leaves behind may go on writing to it.
LOG = "restart.log"
_LAST_LINES = 10
_GRACE_SECONDS = 3.0
_SECRET = re.compile(
    r"(?i)(\b[\w-]*(?:key|token(?!iz)|password|secret)[\w-]*[\"']?\s*[:=]\s*|bearer\s+)(\"[^\"]*\"|'[^']*'|\S+)"
)


@dataclass(frozen=True)
class Restarted:
    """How a restart went; `why` and the last lines of `output` are for the operator."""

    ok: bool
    why: str
    output: tuple[str, ...]


def commands(trial: Trial) -> list[list[str]]:
    """What is run, in order; only the last one's exit status counts.

    A unit that crashed a few times is not started again before its counter is reset (microduck#143).
    """
    unit = trial["unit"]
    if unit:
        return [["systemctl", "reset-failed", unit], ["systemctl", "restart", unit]]
    return [trial["restart"]]


def manual(trial: Trial) -> list[str]:
    """The same as lines for a shell."""
    return [shlex.join(words) for words in commands(trial)]


def refuse_missing(trial: Trial) -> None:
    """Refuse a restart whose program is not there, before anything is changed.

    Raises:
        Refusal: `failed`.
    """
    program = commands(trial)[-1][0]
    if shutil.which(program) is None:
        raise Refusal(
            "failed",
            f"the restart command cannot be started: there is no program {program!r}",
            why="nothing was changed; `restart` runs where the agent runs: behind exec_prefix, so inside a container",
            next_step="correct `restart` in deploy.toml (a path, or a program on the PATH of the login)",
        )


def restart(trial: Trial, folder: Path, environment: dict[str, str], tick: Callable[[str], None]) -> Restarted:
    """Run the restart; one that does not end in time is killed with everything that it started.

    Args:
        trial: How the server is restarted.
        folder: Where the output is kept.
        environment: Beside the login's own.
        tick: Told every now and then that it still runs.
    """
    # A signal that is ignored stays so in a child: a server could never be ended again. A handler does not last.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(ValueError):
            signal.signal(number, _go_on)
    log = folder / LOG
    try:
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        os.ftruncate(fd, 0)
    except OSError:
        # Files are in place that have to be tried or taken back: that matters more than what a command prints.
        fd = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    try:
        end = time.monotonic() + trial["restart_timeout"]
        why = ""
        for words in commands(trial):
            why = _run(words, fd, environment, end, tick)
    finally:
        os.close(fd)
    return Restarted(not why, why, last_lines(log))


def _run(words: list[str], fd: int, environment: dict[str, str], end: float, tick: Callable[[str], None]) -> str:
    """Run one command until `end`; gives what went wrong, or ""."""
    shown = blotted(shlex.join(words))
    try:
        child = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=fd,
            stderr=fd,
            cwd="/",
            env={**os.environ, **environment},
            start_new_session=True,
        )
    except OSError as e:
        return f"{shown} cannot be started: {e.strerror or e}"
    while True:
        try:
            code = child.wait(timeout=min(0.5, max(0.0, end - time.monotonic())))
        except subprocess.TimeoutExpired:
            if time.monotonic() < end:
                tick(f"restarting: {shown}")
                continue
            _kill(child)
            return f"{shown} did not end in time; it was killed with everything that it had started"
        if code == 0:
            return ""
        return f"{shown} ended with {f'signal {-code}' if code < 0 else f'exit status {code}'}"


def _kill(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=_GRACE_SECONDS)
        # The group outlives its leader while anything in it does.
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _go_on(number: int, frame: Any) -> None:  # noqa: ARG001 - the signature of a handler
    return


def last_lines(log: Path) -> tuple[str, ...]:
    """The last lines of a restart's output, secrets blotted out."""
    try:
        with open(log, "rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - 8192))
            text = stream.read().decode("utf-8", "replace")
    except OSError:
        return ()
    lines = [line.strip()[:200] for line in text.splitlines() if line.strip()]
    return tuple(blotted(line) for line in lines[-_LAST_LINES:])


def blotted(line: str) -> str:
    """`line` without the values of what looks like a secret."""
    words = [
        w.decode("utf-8", "replace") for w in without_secrets([w.encode("utf-8", "replace") for w in line.split()])
    ]
    printable = "".join(c if c.isprintable() else "?" for c in " ".join(words))
    return _SECRET.sub(r"\1***", printable)
