# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
import json
import sys
from types import SimpleNamespace

import pytest

from ddtree_overlay import render
from ddtree_overlay.errors import OverlayError, UsageError
from ddtree_overlay.render import Screen
from ddtree_overlay.reports import row


class Terminal(io.StringIO):
    """A text stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    stream = Terminal()
    # pytest gives sys.stdout a new value for each phase, so the module's view of it is replaced instead.
    monkeypatch.setattr(render, "sys", SimpleNamespace(stdout=stream, stderr=stream, stdin=stream))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return stream


LINES = [row(("+ ", "add"), "srt/a.py")]
DIFF = b"--- a/x\n+++ b/x\n@@ -1 +1 @@\n-\x1b[31mold\n+new\n"


def test_pipe_gets_plain_text(capsys):
    """Without a terminal there is no escape sequence."""
    Screen().show(LINES)

    assert capsys.readouterr().out == "+ srt/a.py\n"


def test_terminal_gets_colour(terminal):
    """A terminal gets the same text with colour."""
    Screen().show(LINES)

    assert "\x1b[32m+ \x1b[0m" in terminal.getvalue()


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_environment_turns_colour_off(terminal, monkeypatch, name, value):
    """NO_COLOR and a dumb terminal are respected."""
    monkeypatch.setenv(name, value)
    Screen().show(LINES)

    assert terminal.getvalue() == "+ srt/a.py\n"


def test_option_beats_environment_and_terminal(terminal, monkeypatch):
    """--color never is plain on a terminal, always is coloured even with NO_COLOR."""
    monkeypatch.setenv("NO_COLOR", "1")
    Screen(color="never").show(LINES)
    assert "\x1b" not in terminal.getvalue()
    Screen(color="always").show(LINES)
    assert "\x1b[32m" in terminal.getvalue()


def test_diff_in_a_pipe_is_byte_exact(capsysbinary):
    """What is piped can be applied: no byte is decoded, escaped or wrapped."""
    data = DIFF + b"+\xff latin-1 and \r\n" + b"+" + b"x" * 500 + b"\n"
    Screen().diff(data)

    assert capsysbinary.readouterr().out == data


def test_diff_on_a_terminal_escapes_control_characters(terminal):
    """A file from a host cannot send commands to the terminal."""
    Screen().diff(DIFF)

    assert "\\x1b[31mold" in terminal.getvalue()
    assert "\x1b[32m+new" in terminal.getvalue()


def test_json_mode_prints_one_object_and_nothing_else(capsys):
    """With --json results are silent, notes go to stderr, and only the first object counts."""
    screen = Screen(json=True)
    screen.show(LINES)
    screen.note("working")
    screen.emit({"a": 1})
    screen.emit({"b": 2})
    out, err = capsys.readouterr()

    assert json.loads(out) == {"schema": 1, "a": 1}
    assert err == "working\n"


def test_a_name_that_is_no_utf_8_spoils_no_output(capsys):
    """A login or a folder may be named in bytes: the JSON stays JSON, and a text can be written to any stream."""
    name = b"an\xfe".decode("utf-8", "surrogateescape")
    Screen(json=True).emit({"operator": name})
    Screen().show([row(name)])
    out = capsys.readouterr().out
    assert json.loads(out[: out.index("}") + 1])["operator"] == name
    assert out.endswith("an\\udcfe\n")
    out.encode("utf-8")


def test_quiet_keeps_warnings_and_errors(capsys):
    """-q drops progress only."""
    screen = Screen(verbosity=-1)
    screen.note("working")
    screen.warn("odd")
    screen.fail(OverlayError("broke", why="one\ntwo", next_step="do this"))
    out, err = capsys.readouterr()

    assert out == ""
    assert err == "warning: odd\nerror: broke\n  why:  one\n        two\n  next: do this\n"


def test_progress_without_a_terminal_is_a_line_every_few_seconds(monkeypatch, capsys):
    """A log is not filled by a short run, and a long one is not silent."""
    now = [100.0]
    monkeypatch.setattr(render.time, "monotonic", lambda: now[0])
    with Screen().progress(40) as step:
        for number in range(1, 41):
            step(f"step {number}")
            now[0] += 0.2

    assert capsys.readouterr().err.splitlines() == ["1 of 40: step 1", "26 of 40: step 26"]


def test_question_without_a_terminal_is_refused(monkeypatch):
    """Nobody is there to answer, so the answer is not read from whatever stdin holds."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))

    with pytest.raises(UsageError, match="standard input is not a terminal") as caught:
        Screen().confirm("Push to ct200?", next_step="add --yes")
    assert caught.value.next_step == "add --yes"
