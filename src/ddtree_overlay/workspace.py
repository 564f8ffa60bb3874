# SPDX-License-Identifier: Apache-2.0
"""The folder with `deploy.toml`: where snapshots, bundles and review patches are kept between commands."""

from __future__ import annotations

import contextlib
import os
import shlex
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ddtree_overlay.config import CONFIG_NAME
from ddtree_overlay.errors import ConflictError, OverlayError, UsageError
from ddtree_overlay.manifest import Bundle, Manifest, sha256
from ddtree_overlay.remote import planning


MANIFEST_NAME = "manifest.json"
_SNAPSHOT = "ddtree-overlay snapshot {target}"


@dataclass(frozen=True, slots=True)
class StoredBundle:
    """A bundle on disk."""

    bundle: Bundle
    folder: Path

    def files(self) -> dict[str, bytes]:
        """The patched files, each checked against its digest.

        Raises:
            ConflictError: A file is missing, truncated or changed since it was saved.
        """
        again = f"rm -r {shlex.quote(str(self.folder))} && ddtree-overlay patch {{target}}"
        return {c.path: _checked(self.folder / "files", c.path, c.sha256, "bundle", again) for c in self.bundle.changes}

    def rows(self) -> list[dict[str, Any]]:
        """The changes as the host takes them, with the size of each file; 0 for one that is missing."""
        rows = self.bundle.rows()
        for row in rows:
            file = _inside(self.folder / "files", row["path"])
            row["size"] = file.stat().st_size if file.is_file() else 0
        return rows


@dataclass(frozen=True, slots=True)
class Workspace:
    """Everything the commands keep, below `root`."""

    root: Path

    @classmethod
    def find(cls, start: Path | None = None) -> Workspace:
        """The nearest folder from `start` (default: the current one) upwards that holds `deploy.toml`, else `start`."""
        here = (start or Path.cwd()).resolve()
        if not here.is_dir():
            raise UsageError(f"no such folder: {here}", next_step="create it or name another with --workdir")
        holder = next((d for d in (here, *here.parents) if (d / CONFIG_NAME).is_file()), here)
        return cls(holder)

    @property
    def config_path(self) -> Path | None:
        """The workspace's `deploy.toml`, or None."""
        path = self.root / CONFIG_NAME
        return path if path.is_file() else None

    @property
    def cache(self) -> Path:
        """Downloads that can be had again."""
        return self.root / ".cache"

    def patches(self, release: str) -> Path:
        """The folder of the review patches of one SGLang release."""
        return self.root / "patches" / f"sglang-{release}"

    # Snapshots ------------------------------------------------------------------------------------------------

    def snapshot_folder(self, name: str) -> Path:
        """Where the snapshot `name` lives."""
        return self.root / "snapshots" / name

    def save_snapshot(self, manifest: Manifest, files: Mapping[str, bytes]) -> Path:
        """Write a snapshot: files first, manifest last, so that a manifest never names a file that is not there yet."""
        folder = self.snapshot_folder(manifest.name)
        for path, data in files.items():
            _write(_inside(folder / "files", path), data)
        _prune(folder / "files", files)
        _write(folder / MANIFEST_NAME, manifest.to_json())
        return folder

    def load_manifest(self, name: str) -> Manifest | None:
        """The manifest of the snapshot `name`, or None when there is none.

        Raises:
            ConflictError: The manifest cannot be read.
        """
        path = self.snapshot_folder(name) / MANIFEST_NAME
        try:
            return Manifest.from_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, AttributeError) as e:
            raise ConflictError(f"{path} is damaged", why=str(e), next_step=_SNAPSHOT) from e

    def load_snapshot(self, name: str) -> tuple[Manifest, dict[str, bytes]]:
        """A snapshot with its files, every one hashed again.

        Raises:
            OverlayError: There is no such snapshot.
            ConflictError: A file is missing, truncated or changed.
        """
        manifest = self.load_manifest(name)
        if manifest is None:
            raise OverlayError(f"there is no snapshot of {name}", next_step=_SNAPSHOT)
        base = self.snapshot_folder(name) / "files"
        if not base.is_dir():
            why = "only manifests are kept under version control"
            raise OverlayError(
                f"the files of the snapshot of {name} are not on this machine", why=why, next_step=_SNAPSHOT
            )
        return manifest, {f.path: _checked(base, f.path, f.sha256, "snapshot", _SNAPSHOT) for f in manifest.files}

    def cached_files(self, manifest: Manifest) -> dict[str, bytes]:
        """The files of `manifest` that are on disk and intact: those need no second transfer."""
        base = self.snapshot_folder(manifest.name) / "files"
        found = {}
        for entry in manifest.files:
            with contextlib.suppress(OSError):
                data = _inside(base, entry.path).read_bytes()
                if sha256(data) == entry.sha256:
                    found[entry.path] = data
        return found

    # Bundles --------------------------------------------------------------------------------------------------

    def save_bundle(self, bundle: Bundle, files: Mapping[str, bytes]) -> StoredBundle:
        """Write a bundle and make it the newest; the same bundle again writes the same bytes."""
        folder = self.root / "build" / bundle.overlay_id
        for change in bundle.changes:
            _write(_inside(folder / "files", change.path), files[change.path])
        _write(folder / "bundle.json", bundle.to_json())
        os.utime(folder / "bundle.json")
        return StoredBundle(bundle, folder)

    def load_bundles(self) -> list[StoredBundle]:
        """Every bundle that was built here, the newest first.

        Raises:
            ConflictError: A `bundle.json` cannot be read.
        """
        found = []
        for path in (self.root / "build").glob("*/bundle.json"):
            try:
                bundle = Bundle.from_json(path.read_bytes())
            except (ValueError, TypeError, KeyError) as e:
                raise ConflictError(
                    f"{path} is damaged",
                    why=str(e),
                    next_step=f"rm -r {shlex.quote(str(path.parent))} && ddtree-overlay patch {{target}}",
                ) from e
            found.append((path.stat().st_mtime_ns, StoredBundle(bundle, path.parent)))
        return [stored for _, stored in sorted(found, key=lambda pair: pair[0], reverse=True)]

    def bundle_for(self, live: Mapping[str, str | None]) -> StoredBundle | None:
        """The newest bundle for the base that `live` (path -> sha256, None = absent) shows, or None.

        The rule is that of the host (`planning.choose`). Names and versions play no part.
        """
        stored = self.load_bundles()
        chosen = planning.choose([s.bundle.rows() for s in stored], live)
        return None if chosen is None else stored[chosen]


def _checked(base: Path, path: str, expected: str, kind: str, again: str) -> bytes:
    file = _inside(base, path)
    try:
        data = file.read_bytes()
    except OSError as e:
        raise ConflictError(f"{kind} file {file} cannot be read: {e.strerror}", next_step=again) from e
    if sha256(data) != expected:
        raise ConflictError(
            f"{kind} file {file} is truncated or was changed",
            why=f"{len(data)} bytes with sha256 {sha256(data)[:12]}…, recorded as {expected[:12]}…",
            next_step=again,
        )
    return data


def _inside(base: Path, path: str) -> Path:
    """`base / path`, refusing a path that would leave `base`: manifests come from other machines."""
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts:
        raise ConflictError(f"refusing the path {path!r}: it leaves the package folder")
    return base.joinpath(*pure.parts)


def _write(path: Path, data: bytes) -> None:
    """Replace `path` in one step; a reader sees the old bytes or the new ones. Equal bytes are left alone."""
    with contextlib.suppress(OSError):
        if path.read_bytes() == data:
            return
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, data)


def replace_file(path: Path, data: bytes) -> None:
    """Write `path` whole or not at all, readable for others; its folder is there."""
    fd, temp = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as out:
            out.write(data)
        # mkstemp gives 0600.
        os.chmod(temp, 0o644)
        os.replace(temp, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temp)
        raise


def _prune(folder: Path, keep: Iterable[str]) -> None:
    """Remove files of an earlier snapshot that the new one does not have."""
    wanted = {_inside(folder, k) for k in keep}
    for path in folder.rglob("*"):
        if path.is_file() and path not in wanted:
            path.unlink()
