# SPDX-License-Identifier: Apache-2.0
"""`snapshot`: what is installed, written down with its files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddtree_overlay.cli.options import ANYTHING, App, Target, verb
from ddtree_overlay.cli.targets import opened
from ddtree_overlay.manifest import Manifest
from ddtree_overlay.reports import snapshot_lines
from ddtree_overlay.workspace import Workspace


Files = Mapping[str, bytes]


@verb(targets=ANYTHING, example="ddtree-overlay snapshot --host ct200\n  ddtree-overlay snapshot --release 0.5.11")
def snapshot(app: App, target: Target) -> int:
    """Write down an installed SGLang.

    Finds the SGLang that the configured interpreter imports, copies the modules that DDTREE changes or reads, and
    writes a manifest with versions, install kind, and digest, mode, owner and link count of each file. Files that are
    unchanged since the last snapshot are not transferred again. --release takes the published wheel instead.
    """
    known = app.workspace.load_manifest(target.name)
    cached = app.workspace.cached_files(known) if known else {}
    app.screen.note(f"{target.name}: reading {_source(target)}")
    manifest, files = _take(app, target, known, cached)
    folder = app.workspace.save_snapshot(manifest, files)
    value = {
        "snapshot": manifest.name,
        "folder": str(folder),
        "root": manifest.root,
        "install": manifest.install,
        "versions": dict(manifest.versions),
        "files": len(manifest.files),
        "mentions": len(manifest.mentions),
        "facts": _facts(manifest),
    }
    return app.finish("snapshot", value, snapshot_lines(manifest, _facts(manifest), _shown(app.workspace, folder)))


def _take(app: App, target: Target, known: Manifest | None, cached: Files) -> tuple[Manifest, dict[str, bytes]]:
    from ddtree_overlay import patching, snapshots

    wanted = patching.wanted_paths(patching.load_overlay())
    if target.release is not None:
        return snapshots.snapshot_release(target.release, app.workspace.cache, wanted, known=known, cached=cached)
    with opened(app, target) as transport:
        return snapshots.snapshot_host(transport, target.name, wanted, known=known, cached=cached)


def _facts(manifest: Manifest) -> dict[str, Any]:
    return {k: manifest.facts[k] for k in ("transferred", "unchanged", "bytes") if k in manifest.facts}


def _source(target: Target) -> str:
    return f"the published SGLang {target.release}" if target.release else "the installed SGLang"


def _shown(workspace: Workspace, folder: Any) -> str:
    return str(folder.relative_to(workspace.root))
