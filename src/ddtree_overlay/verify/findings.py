# SPDX-License-Identifier: Apache-2.0
"""What a check found."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Literal


Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One observation of one check.

    Args:
        check: Name of the check (`base`, `syntax`, `structure`, `imports`, `calls`, `attributes`, `hooks`,
            `sites`, `grounds`, `mirrors`, `host`).
        severity: `error` blocks a push, `warning` needs a look, `info` says what was checked or could not be.
        path: Package-relative; empty when it concerns no single file.
        line: From 1; None when it concerns no single line.
        message: One sentence.
    """

    check: str
    severity: Severity
    path: str
    line: int | None
    message: str

    def as_dict(self) -> dict[str, object]:
        """The finding as `--json` prints it."""
        return asdict(self)


@dataclass(slots=True)
class Tally:
    """What was checked; undecidable uses are no findings, but they are counted."""

    findings: list[Finding] = field(default_factory=list)
    imported: int = 0
    bound: int = 0
    undecidable: int = 0
    attributes: int = 0
    unseen: int = 0
