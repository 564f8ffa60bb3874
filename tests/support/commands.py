# SPDX-License-Identifier: Apache-2.0
"""What the command-line tests share: a clean environment and what a command did."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
