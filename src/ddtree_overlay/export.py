# SPDX-License-Identifier: Apache-2.0
"""An overlay as a layer: its files, a manifest, and the agent that puts it in place. For images and cluster tools.

    apply.py          push, rollback, status, history; run by the interpreter that starts the server
    ddtree_agent/     the agent's modules, as they run over SSH
    layer/            the overlay's files by package-relative path
    manifest.json     what each file is and replaces; also the mark by which an earlier export is known again
    Dockerfile        only for images

Equal bundles give equal bytes. Nothing here reads or writes a disk, apart from this program's own modules.
"""

from __future__ import annotations

import contextlib
import io
import json
import tarfile
from collections.abc import Mapping
from importlib import resources
from typing import Any

from ddtree_overlay import __version__
from ddtree_overlay.manifest import Bundle, canonical_json, sha256


SCHEMA = 1
KIND = "ddtree-overlay export"
MANIFEST = "manifest.json"
#: The mode that new files get, folders with permissions of their own apart; a file that is replaced keeps its mode.
MODE, FOLDER_MODE = 0o644, 0o755
_EXECUTABLE = frozenset({"apply.py"})


def export_files(bundle: Bundle, files: Mapping[str, bytes], *, dockerfile: bool = False) -> dict[str, bytes]:
    """Every file of the export of `bundle`, by its path in the export."""
    found = {"apply.py": _own("exported", "apply.py")}
    found |= {f"ddtree_agent/{name}": data for name, data in _agent().items()}
    found |= {f"layer/{c.path}": files[c.path] for c in bundle.changes}
    if dockerfile:
        found |= {"Dockerfile": _own("exported", "Dockerfile"), ".dockerignore": _own("exported", "dockerignore")}
    return {MANIFEST: canonical_json(_manifest(bundle, files, found)), **dict(sorted(found.items()))}


def _manifest(bundle: Bundle, files: Mapping[str, bytes], contents: Mapping[str, bytes]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "kind": KIND,
        "made_by": f"ddtree-overlay {__version__}",
        "release": bundle.release,
        "overlay_id": bundle.overlay_id,
        "base_id": bundle.base_id,
        "files": [
            {
                "path": c.path,
                "base_sha256": c.base_sha256,
                "sha256": c.sha256,
                "size": len(files[c.path]),
                "mode": f"{MODE:04o}",
            }
            for c in bundle.changes
        ],
        "contents": {path: sha256(data) for path, data in contents.items()},
    }


def _own(folder: str, name: str) -> bytes:
    return (resources.files("ddtree_overlay") / folder / name).read_bytes()


def _agent() -> dict[str, bytes]:
    """The agent's modules, without the one that reads them from stdin."""
    folder = resources.files("ddtree_overlay") / "remote"
    names = sorted(f.name for f in folder.iterdir() if f.name.endswith(".py"))
    return {name: _own("remote", name) for name in names if name != "loader.py"}


def mode_of(path: str) -> int:
    """The mode of a file of the export."""
    return 0o755 if path in _EXECUTABLE else MODE


def to_tar(files: Mapping[str, bytes]) -> bytes:
    """The export as a tar file, with one folder at its top: sorted, without times and owners."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path, data in sorted(files.items()):
            member = tarfile.TarInfo(f"{top_folder(files)}/{path}")
            member.size, member.mode = len(data), mode_of(path)
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


def top_folder(files: Mapping[str, bytes]) -> str:
    """The name of the folder at the top of the tar file."""
    return f"ddtree-overlay-{json.loads(files[MANIFEST])['overlay_id']}"


def recorded(manifest: bytes) -> dict[str, str]:
    """Path -> digest of everything that the export with this manifest wrote; nothing when it is no such manifest."""
    with contextlib.suppress(KeyError, TypeError, ValueError):
        raw = json.loads(manifest)
        if raw["kind"] == KIND and canonical_json(raw) == manifest:
            return {**raw["contents"], MANIFEST: sha256(manifest)}
    return {}


def is_tar(data: bytes) -> bool:
    """Whether `to_tar` made this, be it of another bundle or by another version of this program."""
    files = {}
    with contextlib.suppress(tarfile.TarError), tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        for member in archive:
            stream = archive.extractfile(member)
            files[member.name.partition("/")[2]] = stream.read() if stream else b""
    known = recorded(files.get(MANIFEST, b""))
    ours = bool(known) and all(known.get(path) == sha256(content) for path, content in files.items())
    return ours and to_tar(files) == data
