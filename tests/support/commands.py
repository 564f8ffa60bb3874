# SPDX-License-Identifier: Apache-2.0
"""What the command-line tests share: a clean environment and what a command did."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.waiting import HANG


@dataclass(frozen=True)
class Ran:
    """What one command did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one object on stdout."""
        return json.loads(self.out)


def begin(folder: Path, home: Path, *words: str) -> subprocess.Popen[str]:
    """Start the command line in `folder`; it goes on beside the test."""
    return subprocess.Popen(
        [sys.executable, "-m", "ddtree_overlay", *words],
        cwd=folder,
        env=clean_environ(home),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def heard(process: subprocess.Popen[str], text: str) -> str:
    """The lines that the process writes to stderr until one has `text` in it."""
    assert process.stderr
    lines = [""]
    while text not in lines[-1]:
        lines.append(process.stderr.readline())
        assert lines[-1], f"it ended without {text!r}: {''.join(lines)}"
    return "".join(lines)


def outcome(process: subprocess.Popen[str], before: str = "") -> Ran:
    """What the process did, `before` having been read from its stderr."""
    out, err = process.communicate(timeout=4 * HANG)
    return Ran(process.returncode, out, before + err)


def clean_environ(home: Path) -> dict[str, str]:
    """The environment of a user with an empty home and no ssh agent, without switches that hide faults."""
    dropped = ("PYTHON", "SSH_", "NO_COLOR", "FORCE_COLOR", "TERM")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    return {**kept, "HOME": str(home), "TERM": "xterm"}


def refused(done: Ran, code: int, *texts: str) -> None:
    """Assert that a command was refused with `code` and said all of `texts` and a next step on stderr."""
    assert done.code == code, done.err
    for text in ("error: ", "next: ", *texts):
        assert text in done.err
    assert "Traceback" not in done.err
    unfilled(done)


def unfilled(done: Ran) -> None:
    """Assert that no `{name}` that should have been filled in stands in what was said or in the JSON."""
    found = re.findall(r"\{[a-z_.]+\}", done.err + (done.out if done.out.startswith("{") else ""))
    assert not found, (found, done.err)
