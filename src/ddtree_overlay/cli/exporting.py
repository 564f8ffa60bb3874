# SPDX-License-Identifier: Apache-2.0
"""`export`: the bundle of a snapshot as a folder, a tar file or an image's build context."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddtree_overlay.cli.bundles import bundle_of, snapshot_of
from ddtree_overlay.cli.options import ANYTHING, App, verb
from ddtree_overlay.cli.selecting import Fleet, Target
from ddtree_overlay.errors import OverlayError, UsageError
from ddtree_overlay.manifest import sha256
from ddtree_overlay.reports import counted, listed, row
from ddtree_overlay.workspace import replace_file


if TYPE_CHECKING:
    from ddtree_overlay.patching import Patched


_NEXT = {
    "dir": "copy it to a host, and there: PYTHON {name}/apply.py push",
    "tar": "unpack it on a host, and there: PYTHON {top}/apply.py push",
    "dockerfile": "docker build --build-arg BASE=IMAGE --tag NEW-IMAGE {folder}",
}
#: An export has a few hundred kilobytes; whatever is larger than this is none.
_LARGEST_TAR = 64 * 1024 * 1024


def _export_fleet(app: App, fleet: Fleet, *, form: str, out: Path) -> int:
    """One export for several hosts, which must have one bundle."""
    found = {target.name: _patched(app, target) for target in fleet.targets}
    ids = {name: patched.bundle.overlay_id for name, patched in found.items()}
    if len(set(ids.values())) > 1:
        raise UsageError(
            "these hosts need different overlays, and an export holds one",
            why=listed((f"{name} {overlay_id}" for name, overlay_id in ids.items()), 8),
            next_step="export each of them to an --out of its own",
        )
    return _export(app, next(iter(found.values())), listed(ids, 8), form=form, out=out)


@verb(
    targets=ANYTHING,
    example="ddtree-overlay export --host ct200 --format tar --out overlay.tar\n"
    "  ddtree-overlay export --release 0.5.11 --format dockerfile --out image",
    fleet=_export_fleet,
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["dir", "tar", "dockerfile"]),
    required=True,
    help="A folder, a tar file, or a folder with a Dockerfile.",
)
@click.option("--out", type=click.Path(path_type=Path), required=True, metavar="PATH", help="What to write.")
def export(app: App, target: Target, *, form: str, out: Path) -> int:
    """Write the overlay as a layer for images and cluster tools.

    The patched files of a snapshot, a manifest with their digests, and apply.py, which runs the same transaction
    as push and rollback on the machine where it lies. An earlier export is replaced, whole or not at all; nothing
    else is.
    """
    return _export(app, _patched(app, target), target.name, form=form, out=out)


def _patched(app: App, target: Target) -> Patched:
    manifest, _ = snapshot_of(app, target)
    return bundle_of(app, target, manifest)


def _export(app: App, patched: Patched, name: str, *, form: str, out: Path) -> int:
    from ddtree_overlay.export import export_files, to_tar, top_folder

    files = export_files(patched.bundle, patched.files, dockerfile=form == "dockerfile")
    place = out.resolve()
    if not place.parent.is_dir():
        step = f"mkdir -p {shlex.quote(str(place.parent))}"
        raise UsageError(f"--out {out}: there is no folder {place.parent}", next_step=step)
    changed = _write_tar(place, to_tar(files)) if form == "tar" else _write_folder(place, files)
    step = _NEXT[form].format(folder=shlex.quote(str(out)), top=top_folder(files), name=shlex.quote(place.name))
    value = {
        "release": patched.bundle.release,
        "overlay_id": patched.bundle.overlay_id,
        "base_id": patched.bundle.base_id,
        "format": form,
        "out": str(place),
        "changed": changed,
        "files": len(patched.files),
    }
    done = "written to" if changed else "is there already:"
    text = f" {done} {out}, {counted(len(patched.files), 'file')}, {form}"
    head = row((f"{name}: overlay {patched.bundle.overlay_id}", "ok"), text)
    return app.finish("export", value, [head, row(("  next: ", "dim"), step)])


def _write_folder(place: Path, files: Mapping[str, bytes]) -> bool:
    """Make `place` a folder with exactly `files`; False when it is one already.

    Raises:
        OverlayError: There is something that no export wrote.
    """
    from ddtree_overlay.export import FOLDER_MODE, mode_of

    if place.exists() and _look_at(place) == {path: sha256(data) for path, data in files.items()}:
        return False
    temp = Path(tempfile.mkdtemp(prefix=f".{place.name}.", suffix=".tmp", dir=place.parent))
    try:
        new = temp / "new"
        for path, data in files.items():
            target = new / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
            target.chmod(mode_of(path))
        # An image's own user has to read it as well, whatever the umask is here.
        for folder in (new, *(p for p in new.rglob("*") if p.is_dir())):
            folder.chmod(FOLDER_MODE)
        if place.exists():
            place.rename(temp / "old")
        try:
            new.rename(place)
        except OSError:
            if (temp / "old").exists():
                (temp / "old").rename(place)
            raise
    finally:
        shutil.rmtree(temp)
    return True


def _look_at(place: Path) -> dict[str, str]:
    """Path -> digest of every file of an earlier export in `place`; nothing in an empty folder.

    Raises:
        OverlayError: There is something that no export wrote.
    """
    from ddtree_overlay.export import MANIFEST, recorded

    if not place.is_dir():
        raise _occupied(place, "it is not a folder")
    manifest = place / MANIFEST
    known = recorded(manifest.read_bytes()) if manifest.is_file() else {}
    if not known:
        there = sorted(os.listdir(place))
        if there:
            raise _occupied(place, f"it holds {listed(there, 3)}")
        return {}
    found: dict[str, str] = {}
    for folder, folders, names in os.walk(place):
        inner = Path(folder)
        links = [n for n in folders if (inner / n).is_symlink()]
        for path in [*(inner / n for n in [*names, *links]), *([] if names or folders else [inner])]:
            name = path.relative_to(place).as_posix()
            regular = path.is_file() and not path.is_symlink()
            found[name] = sha256(path.read_bytes()) if regular and name in known else ""
    strangers = sorted(n for n, digest in found.items() if known.get(n) != digest)
    if strangers:
        raise _occupied(place, f"no export wrote {listed(strangers, 3)} as it is now")
    return found


def _write_tar(place: Path, data: bytes) -> bool:
    """Make `place` a file with `data`; False when it is one already. Raises as `_write_folder`."""
    from ddtree_overlay.export import is_tar

    if place.exists():
        before = place.read_bytes() if place.is_file() and place.stat().st_size <= _LARGEST_TAR else b""
        if before == data:
            return False
        if not is_tar(before):
            raise _occupied(place, "it is not a tar file that export wrote")
    replace_file(place, data)
    return True


def _occupied(place: Path, why: str) -> OverlayError:
    step = "name another --out, or move what is there away"
    return OverlayError(f"{place} is no earlier export of that format; nothing was written", why=why, next_step=step)
