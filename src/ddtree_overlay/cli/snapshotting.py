# SPDX-License-Identifier: Apache-2.0
"""`snapshot`: what is installed, written down with its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ddtree_overlay.cli.options import ANYTHING, App, verb
from ddtree_overlay.cli.selecting import Target
from ddtree_overlay.cli.targets import opened
from ddtree_overlay.errors import ConflictError
from ddtree_overlay.manifest import FileEntry, Manifest
from ddtree_overlay.published import unlike_published
from ddtree_overlay.releases import release
from ddtree_overlay.reports import moment, snapshot_lines, unlike_line
from ddtree_overlay.workspace import MANIFEST_NAME


if TYPE_CHECKING:
    from ddtree_overlay.patching import AlreadyPatchedError
    from ddtree_overlay.plans import Status


Files = Mapping[str, bytes]
#: Facts of one run, shown and not stored.
PASSING = ("transferred", "unchanged", "bytes")


@verb(targets=ANYTHING, example="ddtree-overlay snapshot --host ct200\n  ddtree-overlay snapshot --release 0.5.11")
def snapshot(app: App, target: Target) -> int:
    """Write down an installed SGLang.

    Finds the SGLang that the configured interpreter imports, copies the modules that DDTREE changes or reads, and
    writes a manifest with versions, install kind, and digest, mode, owner and link count of each file. Files that are
    unchanged since the last snapshot are not transferred again. --release takes the published wheel instead.
    A host that carries the overlay is refused: its files are no base, and the last snapshot stays.
    """
    if target.release is not None:
        release(target.release)
    known = _known(app, target)
    cached = app.workspace.cached_files(known) if known else {}
    app.screen.note(f"{target.name}: reading {_source(target)}")
    manifest, files = _take(app, target, known, cached)
    kept = _kept(manifest, published=target.release is not None)
    folder = app.workspace.save_snapshot(kept, files)
    unlike = {} if target.release is not None else unlike_published(kept)
    if unlike:
        app.screen.warn(f"{target.name}: {unlike_line(kept.release, unlike)}")
    moved = {key: manifest.facts[key] for key in PASSING if key in manifest.facts}
    value = {
        "snapshot": kept.name,
        "folder": str(folder),
        "root": kept.root,
        "install": kept.install,
        "versions": dict(kept.versions),
        "files": len(kept.files),
        "mentions": len(kept.mentions),
        "unlike_published": unlike,
        "facts": moved,
    }
    lines = snapshot_lines(kept, moved, str(folder.relative_to(app.workspace.root)))
    return app.finish("snapshot", value, lines, wrote=True)


def _known(app: App, target: Target) -> Manifest | None:
    """The manifest of the last snapshot; a damaged one is as good as none, for it is about to be written anew."""
    try:
        return app.workspace.load_manifest(target.name)
    except ConflictError as e:
        app.screen.warn(f"{e.what}: taking every file anew")
        return None


def _kept(manifest: Manifest, *, published: bool) -> Manifest:
    """The manifest as it is stored: without what only this run knows, and for a release without this machine's part.

    The manifest of a published wheel is under version control, so it has to be the same wherever it is made.
    """
    facts = {key: value for key, value in manifest.facts.items() if key not in PASSING}
    if not published:
        return replace(manifest, facts=facts)
    files = tuple(FileEntry(entry.path, entry.sha256, entry.size) for entry in manifest.files)
    return replace(manifest, root="sglang", install="wheel", files=files, facts={})


def _take(app: App, target: Target, known: Manifest | None, cached: Files) -> tuple[Manifest, dict[str, bytes]]:
    from ddtree_overlay import deploy, patching, snapshots

    overlay = patching.every_module()
    wanted = patching.wanted_paths()
    if target.release is not None:
        return snapshots.snapshot_release(target.release, app.workspace.cache, wanted, known=known, cached=cached)
    with opened(app, target) as transport:
        taken = snapshots.snapshot_host(transport, target.name, wanted, known=known, cached=cached)
        try:
            patching.check_pristine(taken[1], overlay=overlay)
        except patching.AlreadyPatchedError as e:
            base = None if known is None or any(known.entry(path) for path in overlay) else known
            raise _no_base(app, target, base, deploy.status(transport), e) from e
        return taken


def _no_base(
    app: App, target: Target, base: Manifest | None, live: Status, found: AlreadyPatchedError
) -> ConflictError:
    """The refusal to take a patched install for a base, with what can be done instead."""
    who = f" ({live.deployment.id})" if live.deployment else ""
    kept, step = "there is no earlier snapshot", ""
    if base is not None:
        folder = app.workspace.snapshot_folder(base.name)
        taken = moment((folder / MANIFEST_NAME).stat().st_mtime)
        kept = f"the base snapshot of {taken} in {folder.relative_to(app.workspace.root)} is kept"
        step = f"{target.command('patch')}  # builds on the kept snapshot; for a new one, first:\n"
    undo = f"{target.command('rollback')} --to base"
    if live.state in {"pristine", "upgraded"}:
        undo = f"pip install --force-reinstall --no-deps sglang=={live.version}  # on the host"
    return ConflictError(
        f"{target.name} carries an overlay{who}: its files are no base to snapshot",
        why=f"{found.path}: {found.why}; {kept}",
        next_step=f"{step}{undo}",
    )


def _source(target: Target) -> str:
    return f"the published SGLang {target.release}" if target.release else "the installed SGLang"
