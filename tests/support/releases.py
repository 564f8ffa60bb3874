# SPDX-License-Identifier: Apache-2.0
"""What is done with every release of the table: patch, verify, diff, and take apart again."""

from __future__ import annotations

import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from tests.support import wheels

from ddtree_overlay.diffs import unified
from ddtree_overlay.patching import build_release, modules_of, wanted_paths
from ddtree_overlay.releases import KNOWN, known
from ddtree_overlay.verify import verify_release
from ddtree_overlay.verify.tables import load_mirrors, load_sites


@dataclass(frozen=True, slots=True)
class Done:
    """One release.

    Args:
        version: Which.
        edited: Files that were changed.
        added: Files that are new.
        errors: Messages of findings that would block a push.
        lost: Edited files that did not come back byte for byte.
        diffed: Lines of the diffs of all edited files.
        seconds: Processor time.
    """

    version: str
    edited: int
    added: int
    errors: tuple[str, ...]
    lost: tuple[str, ...]
    diffed: int
    seconds: float


def whole(version: str) -> Done:
    """Patch, verify, diff and unpatch the published wheel of one release."""
    start = time.process_time()
    row = known(version)
    assert row is not None
    manifest, base = wheels.snapshot(wanted_paths(), version)
    patched = build_release(row, base, modules_of(row))
    errors = tuple(
        f"{f.check}: {f.path}: {f.message}"
        for f in verify_release(row, load_sites(row.sites), manifest, base, patched, mirrors=load_mirrors(row.sites))
        if f.severity == "error"
    )
    edited = [edit.path for edit in row.edits]
    diffed = sum(unified(path, base[path], patched.files[path]).count(b"\n") for path in edited)
    lost = tuple(path for path in edited if row.edit(path).remove(patched.files[path]) != base[path])
    seconds = time.process_time() - start
    return Done(version, len(edited), len(patched.files) - len(edited), errors, lost, diffed, seconds)


def every_release(workers: int = 2) -> list[Done]:
    """`whole` for every row of the table, in processes of their own; in the table's order."""
    versions = [row.version for row in KNOWN]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        # The newest have the most files: they go first.
        found = {done.version: done for done in pool.map(whole, reversed(versions))}
    return [found[version] for version in versions]
