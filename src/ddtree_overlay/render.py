# SPDX-License-Identifier: Apache-2.0
"""The only place that writes to the terminal: results on stdout, everything else on stderr, colour where it is welcome.

rich is imported only once something is really coloured, so plain runs and `--help` do not pay for it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TextIO

import click

from ddtree_overlay.errors import OverlayError, UsageError
from ddtree_overlay.manifest import SCHEMA
from ddtree_overlay.reports import Line, plain, row


#: Meaning -> rich style. The text carries the meaning too, so nothing is lost without colour.
STYLES = {
    "add": "green",
    "change": "yellow",
    "remove": "red",
    "ok": "green",
    "warn": "yellow",
    "bad": "bold red",
    "path": "bold",
    "head": "bold",
    "hunk": "cyan",
    "dim": "dim",
    "": "",
}


#: Seconds between two lines of progress where there is no terminal.
_PACE = 5.0


class OutputLostError(OverlayError):
    """Standard output took nothing more: what a command has to say is lost."""


@dataclass(slots=True)
class Screen:
    """One command's output.

    Args:
        json: Print exactly one JSON object on stdout and no other result.
        color: `auto`, `always` or `never`.
        verbosity: -1 quiet, 0 normal, 1 and up more detail.
        command: The verb, None before one is known.
    """

    json: bool = False
    color: str = "auto"
    verbosity: int = 0
    command: str | None = None
    _emitted: bool = False
    _kept: dict[str, Any] | None = None

    def part(self) -> Screen:
        """A screen for one part of the work: it prints like this one, but keeps its JSON object in `emitted`."""
        return Screen(self.json, self.color, self.verbosity, self.command, _kept={})

    @property
    def emitted(self) -> Mapping[str, Any]:
        """What was to be printed as the JSON object of a part."""
        return self._kept or {}

    def show(self, lines: Iterable[Line]) -> None:
        """Print result lines on stdout; silent with `--json`."""
        if not self.json:
            self._write(sys.stdout, list(lines))

    def note(self, text: str) -> None:
        """Say on stderr what is going on; silent with `-q`."""
        if self.verbosity >= 0:
            self._write(sys.stderr, [row((text, "dim"))])

    @contextlib.contextmanager
    def progress(self, total: int) -> Iterator[Callable[[str], None]]:
        """Show on stderr how far a command of `total` steps is; call what it gives with the name of the next step.

        A bar on a terminal, a line every few seconds elsewhere, nothing with `-q`.
        """
        if self.verbosity < 0 or sys.stderr is None or not sys.stderr.isatty():
            yield self._paced(total)
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        colour = self._coloured(sys.stderr)
        console = Console(stderr=True, no_color=not colour, color_system="standard" if colour else None)
        text = TextColumn("{task.description}", markup=False)
        columns = (text, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(elapsed_when_finished=True))
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=total)
            started = itertools.count()
            yield lambda text: bar.update(task, description=text, completed=next(started))

    def _paced(self, total: int) -> Callable[[str], None]:
        """Take the names of steps, and note one when `_PACE` seconds have passed since the last note."""
        done, due = 0, 0.0

        def step(text: str) -> None:
            nonlocal done, due
            done += 1
            if time.monotonic() >= due:
                due = time.monotonic() + _PACE
                self.note(f"{done} of {total}: {text}")

        return step

    def warn(self, text: str) -> None:
        """Say on stderr what the user should know, also with `-q`."""
        self._write(sys.stderr, [row(("warning: ", "warn"), text)])

    def ask_lines(self, lines: Iterable[Line]) -> None:
        """Print what a question is about: with the results, or on stderr when stdout is for JSON."""
        self._write(sys.stderr if self.json else sys.stdout, list(lines))

    def confirm(self, question: str, *, next_step: str) -> bool:
        """Ask on stderr, No being the default.

        Raises:
            UsageError: Nobody can answer, because stdin is not a terminal; `next_step` is given as the way out.
        """
        if sys.stdin is None or not sys.stdin.isatty():
            raise UsageError(
                "cannot ask for confirmation: standard input is not a terminal",
                why=f"the question was: {question}",
                next_step=next_step,
            )
        try:
            return click.confirm(question, default=False, err=True)
        except click.Abort:
            _write_text(sys.stderr, "\n")  # the cursor stands behind the question
            raise

    def emit(self, value: Mapping[str, Any]) -> None:
        """Print the JSON object of a command, with its schema number; silent without `--json`."""
        if self._kept is not None:
            self._kept = self._kept or dict(value)
        elif self.json and not self._emitted:
            self._emitted = True
            whole = {"schema": SCHEMA, **value}
            text = json.dumps(whole, indent=2, ensure_ascii=_narrow(sys.stdout), default=list)
            if _storable(text) != text:
                text = json.dumps(whole, indent=2, default=list)
            _write_text(sys.stdout, text + "\n")

    def fail(self, error: OverlayError) -> None:
        """Print an error on stderr, and on stdout as JSON with `--json`."""
        with contextlib.suppress(OverlayError):  # an unwritable stdout is no reason to lose this error
            self.emit({"command": self.command, "ok": False, **error.as_dict()})
        self.complain(error)

    def complain(self, error: OverlayError, *, about: str = "") -> None:
        """Print an error on stderr; of one of several hosts with its name."""
        what = error.what if about in error.what else f"{about}: {error.what}"
        lines = [row(("error: ", "bad"), what)]
        if error.why:
            lines.append(row(("  why:  ", "dim"), error.why.replace("\n", "\n        ")))
        if error.next_step:
            lines.append(row(("  next: ", "head"), error.next_step.replace("\n", "\n        ")))
        self._write(sys.stderr, lines)

    def trace(self) -> None:
        """Print the traceback of the exception that is being handled on stderr, for who asks for everything (`-vv`)."""
        if self.verbosity > 1:
            _write_text(sys.stderr, traceback.format_exc())

    def diff(self, data: bytes) -> None:
        """Print a unified diff: the exact bytes in a pipe; with colour, control characters are escaped."""
        if self.json:
            return
        if not self._coloured(sys.stdout):
            _write_bytes(sys.stdout, data)
            return
        text = data.decode("utf-8", "backslashreplace").split("\n")
        self._write(sys.stdout, [row((line, _diff_style(line))) for line in (text[:-1] if text[-1] == "" else text)])

    def _coloured(self, stream: TextIO | None) -> bool:
        if self.color != "auto" or stream is None:
            return self.color == "always" and stream is not None
        # https://no-color.org: any non-empty value turns colour off.
        return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def _write(self, stream: TextIO | None, lines: list[Line]) -> None:
        if stream is None:
            return
        if not self._coloured(stream):
            _write_text(stream, "".join(plain(line) + "\n" for line in lines))
            return
        from rich.console import Console
        from rich.text import Text

        console = Console(file=stream, force_terminal=True, color_system="standard", no_color=False, highlight=False)
        with _tolerating_closed(stream):
            for line in lines:
                text = Text.assemble(*((_visible(part), STYLES[style]) for part, style in line))
                console.print(text, soft_wrap=True)


def _narrow(stream: TextIO | None) -> bool:
    """Whether `stream` cannot take every character; JSON can do without those."""
    return (getattr(stream, "encoding", None) or "utf-8").lower().replace("-", "") != "utf8"


def _diff_style(line: str) -> str:
    if line.startswith(("diff ", "--- ", "+++ ")):
        return "head"
    if line.startswith("@@"):
        return "hunk"
    return {"+": "add", "-": "remove"}.get(line[:1], "")


def _visible(text: str) -> str:
    """`text` with control characters escaped: names and messages come from other machines."""
    return "".join(c if c in "\n\t" or c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def _storable(text: str) -> str:
    """`text` with what stands for bytes that are no UTF-8, in a user's or a folder's name, escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def _write_text(stream: TextIO | None, text: str) -> None:
    if stream is None:
        return
    text = _storable(text)
    if stream.isatty():
        text = _visible(text)
    with _tolerating_closed(stream):
        click.echo(text, file=stream, nl=False, color=True)


def _write_bytes(stream: TextIO | None, data: bytes) -> None:
    if stream is None:
        return
    with _tolerating_closed(stream):
        click.echo(data, file=stream, nl=False)


@contextlib.contextmanager
def _tolerating_closed(stream: TextIO) -> Any:
    """Let the command go on when its reader has gone (`… | head -1`): what is printed must not decide the exit code."""
    try:
        yield
        stream.flush()
    except BrokenPipeError:
        silence(stream)
    except OSError as e:
        # ENOSPC and the like on `> file`. A later flush must not fail again, Python's own at exit (120) included.
        silence(stream)
        # What is lost of stderr is only prose; a lost result must not look like success.
        if stream is sys.stdout:
            raise OutputLostError(
                f"cannot write the output: {e.strerror}", next_step="run it again and send the output somewhere else"
            ) from e


def silence(stream: TextIO) -> None:
    """Point `stream` at nothing, so that neither later writes nor the flush at exit fail."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
