# SPDX-License-Identifier: Apache-2.0
"""What a check found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
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
