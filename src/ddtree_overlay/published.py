# SPDX-License-Identifier: Apache-2.0
"""What each supported SGLang was published as: tells a base that somebody has edited from one that pip installed."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ddtree_overlay.manifest import Manifest


def published(version: str) -> Manifest | None:
    """The manifest of the published wheel of `version`, None for a version that this overlay knows nothing about.

    It is the one under version control, which `snapshot --release` writes; an installed package holds a copy.
    """
    here = Path(__file__).resolve().parent
    name = f"sglang-{version}"
    for path in (here / "_published" / f"{name}.json", here.parents[1] / "snapshots" / name / "manifest.json"):
        with contextlib.suppress(FileNotFoundError):
            return Manifest.from_json(path.read_bytes())
    return None


def departures(found: Manifest, release: Manifest) -> dict[str, str]:
    """How files of the snapshot `found` differ from those of the release: path -> how.

    `changed`, `added`, `missing`, `absent`, or `unknown`: there was nothing to compare it with. Which files a snapshot
    holds depends on the overlay; those that mention DFlash are in every one, so only of these can it be said that one
    is missing or was added. Another of the release's is absent: removed, or not taken by an older overlay.
    """
    known = {entry.path: entry.sha256 for entry in release.files}
    result = {e.path: "changed" for e in found.files if e.path in known and e.sha256 != known[e.path]}
    result |= dict.fromkeys(set(found.mentions) - set(release.mentions) - result.keys(), "added")
    held = {e.path for e in found.files}
    result |= dict.fromkeys(set(release.mentions) - held, "missing")
    result |= dict.fromkeys(known.keys() - held - result.keys(), "absent")
    result |= dict.fromkeys(held - known.keys() - result.keys(), "unknown")
    return dict(sorted(result.items()))


def unlike_published(found: Manifest) -> dict[str, str]:
    """As `departures` from the release that `found` says it is; empty when that release is not known."""
    release = published(found.release)
    return {} if release is None else departures(found, release)
