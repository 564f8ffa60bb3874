# SPDX-License-Identifier: Apache-2.0
"""Proof that a bundle is what it claims to be: findings, each from a small check of its own."""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping

from ddtree_overlay import collector
from ddtree_overlay.manifest import Manifest
from ddtree_overlay.patching import Patched, wanted_paths
from ddtree_overlay.releases import Release, release
from ddtree_overlay.verify.attributes import check_attributes
from ddtree_overlay.verify.findings import Finding, Tally
from ddtree_overlay.verify.grounds import check_grounds
from ddtree_overlay.verify.hooks import check_hooks, occurrences
from ddtree_overlay.verify.host import verify_on_host
from ddtree_overlay.verify.mentions import Place
from ddtree_overlay.verify.mirrors import check_mirrors
from ddtree_overlay.verify.read import check_read
from ddtree_overlay.verify.sites import check_sites
from ddtree_overlay.verify.structure import check_base, check_insertion_only, check_unpatch
from ddtree_overlay.verify.symbols import Class, Symbols
from ddtree_overlay.verify.syntax import check_syntax
from ddtree_overlay.verify.tables import Site, load_mirrors, load_sites
from ddtree_overlay.verify.uses import check_calls, check_imports


__all__ = ["Finding", "verify_bundle", "verify_on_host", "verify_release"]

_ORDER = {"error": 0, "warning": 1, "info": 2}


def verify_bundle(manifest: Manifest, base: Mapping[str, bytes], patched: Patched) -> list[Finding]:
    """Everything that can be proven without the host, errors first.

    Args:
        manifest: The snapshot's.
        base: The snapshot's files.
        patched: What was built from them.

    Raises:
        OverlayError: The bundle's release is not supported.
    """
    row = release(patched.bundle.release)
    sites, mirrors = load_sites(row.sites), load_mirrors(row.sites)
    findings = [*verify_release(row, sites, manifest, base, patched, mirrors=mirrors), *check_base(manifest)]
    return sorted(findings, key=lambda f: _ORDER[f.severity])


@collector.paused()
def verify_release(
    row: Release,
    sites: Collection[Site],
    manifest: Manifest,
    base: Mapping[str, bytes],
    patched: Patched,
    *,
    mirrors: Mapping[Place, str],
) -> list[Finding]:
    """As `verify_bundle`, for one row of the release table and what its site table holds."""
    findings = check_syntax(manifest.versions.get("python"), patched.files)
    findings += check_insertion_only(row, base, patched.files)
    findings += check_unpatch(row, base, patched.files)
    if not any(f.check == "syntax" and f.severity == "error" for f in findings):
        findings += _check_code(row, mirrors, base, patched)
    findings += check_sites(sites, [m for m in manifest.mentions if m.startswith("srt/")], base)
    findings += check_mirrors(mirrors, base)
    findings += check_grounds(sites, row, {**base, **patched.files})
    return sorted(findings, key=lambda f: _ORDER[f.severity])


def _check_code(row: Release, mirrors: Collection[Place], base: Mapping[str, bytes], patched: Patched) -> list[Finding]:
    added = {c.path: patched.files[c.path] for c in patched.bundle.changes if c.adds}
    symbols = Symbols({**base, **patched.files}, wanted_paths(added))
    tally = Tally()
    hooks: list[Finding] = []
    heirs = [Class(path, n) for path in added for n in symbols.tree(path).body if isinstance(n, ast.ClassDef)]
    for edit in row.edits:
        tree = symbols.tree(edit.path)
        hooks += check_hooks(edit, tree)
        found = [o for insertion in edit.insertions for o in occurrences(tree, insertion)]
        inserted = [statement for occurrence in found for statement in occurrence.statements]
        check_imports(symbols, edit.path, inserted, tally)
        check_calls(symbols, edit.path, tally, only=inserted, heirs=heirs)
        check_attributes(symbols, edit.path, tally, only=inserted, heirs=heirs)
    for path in added:
        check_imports(symbols, path, [symbols.tree(path)], tally)
        check_calls(symbols, path, tally)
        check_attributes(symbols, path, tally)
    count = sum(len(edit.insertions) for edit in row.edits)
    return [
        *hooks,
        *tally.findings,
        *check_read(mirrors, symbols, row.edits, added, base),
        Finding("hooks", "info", "", None, f"{count} insertions in {len(row.edits)} files looked for"),
        Finding("imports", "info", "", None, f"{tally.imported} names imported from SGLang looked up"),
        Finding("calls", "info", "", None, f"{tally.bound} calls bound to signatures, {tally.undecidable} undecidable"),
        Finding("attributes", "info", "", None, f"{tally.attributes} attributes looked up, {tally.unseen} undecidable"),
    ]
