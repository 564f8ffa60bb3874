# SPDX-License-Identifier: Apache-2.0
"""How well the overlay fits an SGLang that is not supported: insertion by insertion, name by name, site by site.

Nothing is built for anybody to push: what comes out is a report. It is made with the row of the release table that is
nearest to the version, which is also where the row of the new release starts from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ddtree_overlay import collector
from ddtree_overlay.edits.anchors import AnchorError
from ddtree_overlay.edits.base import Edit, Insertion
from ddtree_overlay.manifest import Manifest
from ddtree_overlay.patching import Patched, build_release, check_pristine, modules_of
from ddtree_overlay.releases import KNOWN, Release, is_supported, known
from ddtree_overlay.verify import Finding, verify_release
from ddtree_overlay.verify.tables import load_mirrors, load_sites


@dataclass(frozen=True, slots=True)
class Misfit:
    """An insertion that has no single place in the new file.

    Args:
        insertion: The insertion.
        error: What was looked for, where, and what is nearest to it.
    """

    insertion: Insertion
    error: AnchorError


@dataclass(frozen=True, slots=True)
class EditFit:
    """One edit of the row on the file of the new release.

    Args:
        edit: The edit.
        misfits: Insertions that do not fit; all of them when the file is missing.
        missing: Whether there is no such file.
        moved: Files of the same name elsewhere, when there is none here.
        elsewhere: Releases whose edit of this file fits completely.
    """

    edit: Edit
    misfits: tuple[Misfit, ...] = ()
    missing: bool = False
    moved: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether every insertion has its place."""
        return not self.missing and not self.misfits

    def as_dict(self) -> dict[str, Any]:
        """The value as `--json` prints it."""
        bad = {m.insertion: m.error for m in self.misfits}
        return {
            "path": self.edit.path,
            "fits": self.fits,
            "missing": self.missing,
            "moved": list(self.moved),
            "elsewhere": list(self.elsewhere),
            "insertions": [
                {
                    "scope": i.scope,
                    "anchor": i.anchor.text,
                    "fits": not self.missing and i not in bad,
                    "problem": bad[i].problem if i in bad else None,
                    "places": [list(place) for place in bad[i].places] if i in bad else [],
                }
                for i in self.edit.insertions
            ],
        }


@dataclass(frozen=True, slots=True)
class Fit:
    """The report.

    Args:
        version: The SGLang that was looked at.
        based_on: The release whose row was tried.
        supported: Whether the version is supported anyway.
        edits: The row's edits, in order.
        findings: What `verify` says of the files with the insertions that fit; empty when it was not asked.
    """

    version: str
    based_on: str
    supported: bool
    edits: tuple[EditFit, ...]
    findings: tuple[Finding, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether nothing is left to do but to add the row."""
        return all(e.fits for e in self.edits) and not any(f.severity == "error" for f in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """The value as `--json` prints it."""
        return {
            "release": self.version,
            "based_on": self.based_on,
            "supported": self.supported,
            "fits": self.complete,
            "edits": [edit.as_dict() for edit in self.edits],
            "findings": [finding.as_dict() for finding in self.findings],
        }


def nearest(version: str) -> Release:
    """The row for a version, or the one of the newest release before it; before all of them, the oldest."""
    exact = known(version)
    if exact is not None:
        return exact
    before = [row for row in KNOWN if _order(row.version) <= _order(version)]
    return max(before, key=lambda row: _order(row.version)) if before else KNOWN[0]


@collector.paused()
def fit(manifest: Manifest, base: Mapping[str, bytes], *, names_and_sites: bool = True) -> Fit:
    """Try the nearest row on a base.

    Args:
        manifest: The snapshot's.
        base: The snapshot's files.
        names_and_sites: Also check, with the insertions that fit, every name and call of the overlay and every site.

    Raises:
        AlreadyPatchedError: The base is not pristine.
        OverlayError: A file is no Python that can be edited.
    """
    check_pristine(base)
    row = nearest(manifest.release)
    edits = tuple(_fit_edit(edit, base) for edit in row.edits)
    findings: tuple[Finding, ...] = ()
    if names_and_sites:
        part = replace(row, version=manifest.release, edits=tuple(filter(None, map(_fitting, edits))))
        sites, mirrors = load_sites(row.sites), load_mirrors(row.sites)
        findings = tuple(verify_release(part, sites, manifest, base, _patched(part, base), mirrors=mirrors))
    return Fit(manifest.release, row.version, is_supported(manifest.release), edits, findings)


def _patched(row: Release, base: Mapping[str, bytes]) -> Patched:
    return build_release(row, base, modules_of(row))


def _fit_edit(edit: Edit, base: Mapping[str, bytes]) -> EditFit:
    data = base.get(edit.path)
    if data is None:
        name = edit.path.rpartition("/")[2]
        moved = tuple(sorted(path for path in base if path.rpartition("/")[2] == name))
        return EditFit(edit, missing=True, moved=moved)
    if edit.fits(data):
        return EditFit(edit)
    misfits = tuple(Misfit(insertion, error) for insertion, error in edit.misfits(data))
    return EditFit(edit, misfits, elsewhere=_elsewhere(edit, data))


def _elsewhere(edit: Edit, data: bytes) -> tuple[str, ...]:
    others = {row.version: row.edit(edit.path) for row in KNOWN}
    fits = {other: other.fits(data) for other in set(others.values()) if other not in (None, edit)}
    return tuple(version for version, other in others.items() if other is not None and fits.get(other))


def _fitting(found: EditFit) -> Edit | None:
    """The edit with the insertions that fit, None when there are none."""
    if found.fits:
        return found.edit
    bad = {m.insertion for m in found.misfits}
    rest = tuple(i for i in found.edit.insertions if i not in bad)
    return replace(found.edit, insertions=rest) if rest and not found.missing else None


def _order(version: str) -> tuple[int, ...]:
    """`0.5.12 < 0.5.12.post1 < 0.5.13.dev1 < 0.5.13rc1 < 0.5.13`: what of a version decides which is newer."""
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    release = [int(n) for n in numbers.group().split(".")] if numbers else []
    rest = version[numbers.end() :] if numbers else ""
    kind = {"post": 1, "dev": -2, "a": -1, "b": -1, "rc": -1}
    suffix = re.match(r"[.-]?(post|dev|rc|a|b)\d*", rest)
    return (*(release + [0] * 4)[:4], kind[suffix.group(1)] if suffix else 0)
