# SPDX-License-Identifier: Apache-2.0
"""Check `syntax`: every patched file compiles under the target's Python."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Mapping

from ddtree_overlay.verify.findings import Finding


def check_syntax(python: str | None, files: Mapping[str, bytes]) -> list[Finding]:
    """Compile every file here, if this Python is of the target's minor version; else say that the host must do it.

    Args:
        python: The target's version, `3.11.9`; None when the snapshot came from no host.
        files: Patched files by path.
    """
    here = platform.python_version()
    findings = []
    if python is None:
        message = f"compiled with Python {here}; the snapshot names no target Python"
        findings.append(Finding("syntax", "info", "", None, message))
    elif _minor(python) != _minor(here):
        message = f"the target runs Python {python}, this is {here}: not compiled here, verify --host does it there"
        return [Finding("syntax", "info", "", None, message)]
    for path, data in files.items():
        try:
            with warnings.catch_warnings():
                # An upstream file's dubious escape sequence is not ours to report.
                warnings.simplefilter("ignore")
                compile(data, path, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            findings.append(Finding("syntax", "error", path, getattr(error, "lineno", None), str(error)))
    return findings


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:2])
