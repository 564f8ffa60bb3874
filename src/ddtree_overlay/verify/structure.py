# SPDX-License-Identifier: Apache-2.0
"""Checks `base` and `structure`: the base is as published, every upstream line survives, unpatching gives the base."""

from __future__ import annotations

from collections.abc import Mapping

from ddtree_overlay.diffs import count_inserted, first_lost
from ddtree_overlay.errors import OverlayError
from ddtree_overlay.manifest import Manifest
from ddtree_overlay.published import departures, published
from ddtree_overlay.releases import Release
from ddtree_overlay.verify.findings import Finding


#: Files in which an upstream line may change, each with its reason. So far insertion has always been enough.
REWRITTEN: Mapping[str, str] = {}


def check_base(manifest: Manifest) -> list[Finding]:
    """A warning for each file of the snapshot that is not as the release was published."""
    version = manifest.release
    release = published(version)
    if release is None:
        return [Finding("base", "info", "", None, f"what SGLang {version} was published as is not known here")]
    unlike = departures(manifest, release)
    if not unlike:
        same = f"{len(manifest.files)} files are as SGLang {version} was published"
        return [Finding("base", "info", "", None, same)]
    since = f"since SGLang {version} was published; the overlay is not tested on that"
    said = {
        "changed": f"changed {since}",
        "added": f"made to mention DFlash {since}",
        "missing": f"removed, or cleared of DFlash, {since}",
        "absent": f"not in the snapshot: removed {since}; or take the snapshot again, which an older overlay took",
        "unknown": f"not compared: not among the files that are known of SGLang {version} as it was published",
    }
    return [Finding("base", "warning", path, None, said[how]) for path, how in unlike.items()]


def check_insertion_only(release: Release, base: Mapping[str, bytes], files: Mapping[str, bytes]) -> list[Finding]:
    """A finding for each edited file that dropped, changed or moved an upstream line."""
    findings = []
    for edit in release.edits:
        before, after = base.get(edit.path), files.get(edit.path)
        if before is None or after is None or count_inserted(before, after) is not None:
            continue
        if edit.path in REWRITTEN:
            findings.append(Finding("structure", "info", edit.path, None, f"rewritten: {REWRITTEN[edit.path]}"))
            continue
        number, text = first_lost(before, after) or (0, b"")
        shown = text.decode("utf-8", "replace").strip()
        message = f"upstream line {number} did not survive: {shown}"
        findings.append(Finding("structure", "error", edit.path, number or None, message))
    return findings


def check_unpatch(release: Release, base: Mapping[str, bytes], files: Mapping[str, bytes]) -> list[Finding]:
    """A finding for each edited file that does not come apart into the base again."""
    findings = []
    for edit in release.edits:
        if edit.path not in base or edit.path not in files:
            continue
        try:
            same = edit.remove(files[edit.path]) == base[edit.path]
            message = "unpatching does not give the base bytes"
        except OverlayError as error:
            same, message = False, f"cannot be unpatched: {error.what}"
        if not same:
            findings.append(Finding("structure", "error", edit.path, None, message))
    return findings
