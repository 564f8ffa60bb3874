# SPDX-License-Identifier: Apache-2.0
"""What `--try` found, as lines for a terminal."""

from __future__ import annotations

from ddtree_overlay.fitting import EditFit, Fit
from ddtree_overlay.reports import Line, counted, finding_lines, listed, row


def fit_lines(found: Fit) -> list[Line]:
    """The edits one by one, what `verify` says of the rest, and what that means."""
    lines = [row((f"SGLang {found.version}", "head"), f"  {_about(found)}")]
    for edit in found.edits:
        lines += _edit_lines(edit)
    if found.findings:
        lines += finding_lines(found.findings)
    return [*lines, _verdict(found)]


def _about(found: Fit) -> str:
    if found.version == found.based_on:
        return "is supported" if found.supported else "is in the table, but not complete: nothing is built for it"
    return f"is not supported; tried with the row of {found.based_on}"


def _edit_lines(found: EditFit) -> list[Line]:
    count = len(found.edit.insertions)
    if found.fits:
        return [row(("fits    ", "ok"), f"{found.edit.path}: {counted(count, 'insertion')}")]
    if found.missing:
        moved = f"; the same name: {listed(found.moved)}" if found.moved else ""
        return [row(("missing ", "bad"), f"{found.edit.path}: SGLang has no such file{moved}")]
    text = f"{found.edit.path}: {len(found.misfits)} of {counted(count, 'insertion')}"
    if found.elsewhere:
        text += f"; the edit of {listed(found.elsewhere)} fits"
    lines = [row(("differs ", "bad"), text)]
    for misfit in found.misfits:
        error = misfit.error
        lines.append(row(f"          {error.scope}: {error.problem}: `{error.wanted.splitlines()[0]}`"))
        lines += [row((f"            line {line}: {text}", "dim")) for line, text in error.places]
    return lines


def _verdict(found: Fit) -> Line:
    bad = sum(not edit.fits for edit in found.edits)
    errors = sum(f.severity == "error" for f in found.findings)
    if found.complete:
        said = "nothing left but its row in releases.py" if found.version != found.based_on else "everything fits"
        return row(("fits: ", "ok"), said if found.findings else f"{said}; verify --try looks at names and sites too")
    parts = [counted(bad, "edit")] if bad else []
    parts += [counted(errors, "finding")] if errors else []
    return row(("does not fit: ", "bad"), f"{' and '.join(parts)}; docs/new_release.md says what to do with each")
