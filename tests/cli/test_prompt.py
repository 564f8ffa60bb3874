# SPDX-License-Identifier: Apache-2.0
"""The question before a push, asked on a real pseudo-terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.commands import clean_environ
from tests.support.trees import differences, listing
from tests.support.waiting import HANG


class Session:
    """A command on a pseudo-terminal that is both its stdin and its stderr."""

    def __init__(self, words: list[str], cwd: Path, home: Path) -> None:
        self.master, slave = pty.openpty()
        self.text = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ddtree_overlay", *words],
            cwd=cwd,
            env=clean_environ(home),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            # A shell's background job ignores SIGINT, and its children would inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        )
        os.close(slave)

    def until(self, text: str, seconds: float = HANG) -> str:
        """Read until `text` was printed."""
        deadline = time.monotonic() + seconds
        while text not in self.text:
            assert time.monotonic() < deadline, self.text
            if not self._read():
                assert text in self.text, self.text
        return self.text

    def answer(self, text: str) -> None:
        """Type a line."""
        os.write(self.master, f"{text}\n".encode())

    def code(self, seconds: float = HANG) -> int:
        """Read to the end and give the exit code."""
        deadline = time.monotonic() + seconds
        while self._read():
            assert time.monotonic() < deadline, self.text
        return self.process.wait(HANG)

    def interrupt(self, seconds: float = HANG) -> int:
        """Send SIGINT and give the exit code.

        A signal that comes between Python's check and its read is only seen after the read, so it is sent again.
        """
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.text
            self.process.send_signal(signal.SIGINT)
            patience = time.monotonic() + 5
            while time.monotonic() < patience and self._read():
                pass
        return self.code()

    def _read(self) -> bool:
        if not select.select([self.master], [], [], 1)[0]:
            return self.process.poll() is None
        try:
            data = os.read(self.master, 65536)
        except OSError:  # EIO: the other side is closed
            return False
        self.text += data.decode(errors="replace").replace("\r\n", "\n")
        return bool(data)

    def close(self) -> None:
        """End the process if it is still there."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(HANG)
        os.close(self.master)


@pytest.fixture
def push_session(patched_root: Path, workspace: Path, tmp_path: Path) -> Iterator[Callable[..., Session]]:
    """Start `push` on a terminal."""
    started: list[Session] = []

    def start(*words: str) -> Session:
        started.append(Session(["push", "--root", str(patched_root), *words], workspace, tmp_path / "home"))
        return started[-1]

    yield start
    for session in started:
        session.close()


@pytest.mark.parametrize("answer", ["n", ""])
def test_question_names_the_host_and_defaults_to_no(push_session, site, answer):
    """Anything but yes leaves the host alone and does not look like success."""
    before = listing(site)
    session = push_session()

    assert re.search(r"Push to root-sglang-[0-9a-f]{6}\? \[y/N\]", session.until("[y/N]"))
    session.answer(answer)
    assert session.code() == 1
    assert "nothing was changed" in session.text
    assert not differences(before, listing(site))


def test_yes_pushes_in_colour(push_session, site):
    """A terminal gets a coloured plan, and `y` runs it."""
    before = listing(site)
    session = push_session()

    session.until("[y/N]")
    session.answer("y")
    assert session.code() == 0, session.text
    assert "\x1b[32m+" in session.text
    assert "pushed as d-0001" in session.text
    assert differences(before, listing(site))


def test_file_that_changes_while_the_question_waits_is_a_conflict(push_session, patched_root, site):
    """Exit 4: what runs is the plan that was shown, or nothing (pyinfra#387, #421)."""
    session = push_session()
    session.until("[y/N]")
    file = patched_root / "srt/server_args.py"
    data = file.read_bytes()
    file.unlink()
    file.write_bytes(data + b"# edited by hand\n")
    before = listing(site)

    session.answer("y")
    assert session.code() == 4, session.text
    assert "srt/server_args.py" in session.text
    assert not [d for d in differences(before, listing(site)) if ".ddtree-overlay" not in d]


def test_interrupt_at_the_question_ends_with_130(push_session, site):
    """Ctrl-C is no failure of the host and no success: 130, nothing written."""
    before = listing(site)
    session = push_session()
    session.until("[y/N]")

    assert session.interrupt() == 130, session.text
    assert "Traceback" not in session.text
    assert not differences(before, listing(site))
