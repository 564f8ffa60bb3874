# SPDX-License-Identifier: Apache-2.0
"""`patch`, `verify` and `diff`: make the bundle of a snapshot, prove it, and show what it would change."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from ddtree_overlay.cli.options import ANYTHING, INSTALLED, App, verb
from ddtree_overlay.cli.selecting import Target
from ddtree_overlay.cli.targets import bundles, deployed_bundle, opened
from ddtree_overlay.cli.trying import TRY, try_out
from ddtree_overlay.errors import DifferencesError, OverlayError, UsageError
from ddtree_overlay.manifest import Manifest, sha256
from ddtree_overlay.published import unlike_published
from ddtree_overlay.releases import release
from ddtree_overlay.reports import bundle_lines, counted, finding_lines, listed, row, unlike_line


if TYPE_CHECKING:
    from ddtree_overlay.patching import Patched
    from ddtree_overlay.plans import Status
    from ddtree_overlay.workspace import StoredBundle


@verb(targets=ANYTHING, example="ddtree-overlay patch --host ct200\n  ddtree-overlay patch --release 0.5.11 --check")
@click.option("--check", is_flag=True, help="Write nothing; exit 3 when patches/ is not what would be written.")
@TRY
def patch(app: App, target: Target, *, check: bool, attempt: bool) -> int:
    """Build the patched files of a snapshot.

    All of it in memory first: one failing edit, and nothing is written. With --release the review diffs below
    patches/ are written as well.
    """
    if attempt:
        if check:
            raise UsageError("--check and --try exclude each other", next_step="leave --check out")
        return try_out(app, target, "patch", names_and_sites=False)
    manifest, base = snapshot_of(app, target)
    from ddtree_overlay import patches, patching

    patched = patching.build(base, manifest.release)
    unlike = {} if target.release is not None else unlike_published(manifest)
    if unlike:
        app.screen.warn(f"{target.name}: {unlike_line(manifest.release, unlike)}")
    folder = app.workspace.patches(manifest.release)
    shown = folder.relative_to(app.workspace.root)
    if check:
        stale = patches.check_patches(folder, base, patched)
        if stale:
            raise DifferencesError(
                f"{shown} is not what the edits give",
                why="\n".join(stale),
                next_step=f"{target.command('patch')}  # and commit the result",
            )
        fresh = {"release": manifest.release, "overlay_id": patched.bundle.overlay_id}
        return app.finish("patch", fresh, [row((f"{shown} is up to date", "ok"))])
    stored = app.workspace.save_bundle(patched.bundle, patched.files)
    where = str(stored.folder.relative_to(app.workspace.root))
    lines = bundle_lines(target.name, patched.bundle, where)
    if target.release is not None:
        patches.write_patches(folder, base, patched)
        lines.append(row(f"review diffs in {shown}"))
    value = {
        "release": manifest.release,
        "overlay_id": patched.bundle.overlay_id,
        "base_id": patched.bundle.base_id,
        "folder": str(stored.folder),
        "unlike_published": unlike,
        "changes": [
            {"path": c.path, "action": "add" if c.adds else "change", "added": c.added, "removed": c.removed}
            for c in patched.bundle.changes
        ],
    }
    return app.finish("patch", value, lines, wrote=True)


@verb(targets=ANYTHING, example="ddtree-overlay verify --host ct200\n  ddtree-overlay verify --release 0.5.11 --json")
@click.option("--offline", is_flag=True, help="Leave out what runs on the host: its compiler, imports, `--help`.")
@TRY
def verify(app: App, target: Target, *, offline: bool, attempt: bool) -> int:
    """Prove the patched files, here and on the host.

    Checks syntax, upstream lines, hooks, attributes, call signatures, classified sites, and imports on the host. Prints
    findings and exits 3 when one of them is an error. Nothing is written, on the host only a scratch folder
    that is removed again.
    """
    if attempt:
        return try_out(app, target, "verify", names_and_sites=True)
    from ddtree_overlay.patching import check_pristine
    from ddtree_overlay.verify import verify_bundle, verify_on_host

    manifest, base = snapshot_of(app, target)
    check_pristine(base)
    patched = bundle_of(app, target, manifest)
    app.screen.note(f"{target.name}: checking bundle {patched.bundle.overlay_id}")
    findings = list(verify_bundle(manifest, base, patched))
    if target.host is not None and not offline:
        app.screen.note(f"{target.name}: compiling and importing on the host")
        with opened(app, target) as transport:
            findings += verify_on_host(transport, manifest, patched)
    code = 3 if any(f.severity == "error" for f in findings) else 0
    value = {
        "overlay_id": patched.bundle.overlay_id,
        "findings": [finding.as_dict() for finding in findings],
    }
    return app.finish("verify", value, finding_lines(findings), code)


@verb(targets=INSTALLED, example="ddtree-overlay diff --host ct200 | less -R")
@click.option("--exit-code", is_flag=True, help="Exit 3 when there is a difference.")
def diff(app: App, target: Target, *, exit_code: bool) -> int:
    """Show what a push would change on a host now.

    A unified diff, coloured on a terminal and plain in a pipe. Where files were edited by hand since a push, what
    takes the edit back.
    """
    from ddtree_overlay import deploy, diffs

    known = bundles(app, target)
    paths = {change.path for stored in known for change in stored.bundle.changes}
    with opened(app, target) as transport:
        live = deploy.fetch_files(transport, paths)
        digests = {path: sha256(data) if data is not None else None for path, data in live.items()}
        stored = app.workspace.bundle_for(digests)
        edited = deploy.status(transport) if stored is None else None
    if edited is not None and edited.leftovers:
        # What an installer left behind is none of the files that a bundle is made for.
        stored = app.workspace.bundle_for({**digests, **dict.fromkeys(edited.leftovers)})
        edited = edited if stored is None else None
    if edited is not None:
        stored = deployed_bundle(target, known, edited, digests)
    assert stored is not None
    files = stored.files()
    changed = [p for p in sorted(files) if live[p] != files[p]]
    data = b"".join(diffs.unified(f"sglang/{p}", live[p], files[p]) for p in changed)
    app.screen.diff(data)
    if edited is not None:
        app.screen.warn(_edited(target, edited, stored, digests))
    else:
        would = f"{counted(len(changed), 'file')} would change" if changed else "no difference"
        app.screen.note(f"{target.name}: {would}")
    value = {
        "overlay_id": stored.bundle.overlay_id,
        "deployment": edited.deployment.id if edited and edited.deployment else None,
        "files": changed,
        "diff": data.decode("utf-8", "surrogateescape"),
    }
    return app.finish("diff", value, [], 3 if changed and exit_code else 0)


def _edited(target: Target, live: Status, stored: StoredBundle, digests: Mapping[str, str | None]) -> str:
    """What a diff against the live deployment means, and the way out."""
    name = live.deployment.id if live.deployment else "the overlay"
    wrong = [c.path for c in stored.bundle.changes if digests[c.path] not in (c.base_sha256, c.sha256)]
    return (
        f"{target.name}: changed by hand since {name} was pushed: {listed(wrong)}. push and rollback refuse that; "
        f"the diff takes it back on the host:\npatch -p2 -d {shlex.quote(live.root)} < DIFF"
    )


def snapshot_of(app: App, target: Target) -> tuple[Manifest, dict[str, bytes]]:
    """The target's snapshot with its files.

    Raises:
        OverlayError: A release is named that is not supported.
    """
    if target.release is not None:
        release(target.release)
    return app.workspace.load_snapshot(target.name)


def bundle_of(app: App, target: Target, manifest: Manifest) -> Patched:
    """The bundle that was built for this snapshot, with its files."""
    from ddtree_overlay.patching import Patched

    digests = {entry.path: entry.sha256 for entry in manifest.files}
    stored = app.workspace.bundle_for(digests)
    if stored is None:
        raise OverlayError(f"the snapshot of {target.name} was not patched yet", next_step=target.command("patch"))
    return Patched(stored.bundle, stored.files())
