# SPDX-License-Identifier: Apache-2.0
"""Snapshots: the base files of a SGLang on a host, in a folder or in the published wheel, checked end to end."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ddtree_overlay.config import Host
from ddtree_overlay.errors import ConflictError, OverlayError
from ddtree_overlay.hosts.transport import Transport, open_transport
from ddtree_overlay.manifest import FileEntry, Manifest, sha256
from ddtree_overlay.releases import unsupported
from ddtree_overlay.reports import listed
from ddtree_overlay.verify.mentions import WATCHED
from ddtree_overlay.wheels import check_release, fetch_release


#: The oldest release that has DFlash.
FIRST_WITH_DFLASH = (0, 5, 11)

Snapshot = tuple[Manifest, dict[str, bytes]]


def snapshot_host(
    transport: Transport,
    name: str,
    wanted: Collection[str],
    *,
    known: Manifest | None = None,
    cached: Mapping[str, bytes] | None = None,
) -> Snapshot:
    """Take a snapshot of the SGLang that the host's interpreter imports.

    Args:
        transport: The host.
        name: Name of the snapshot.
        wanted: Package-relative paths to take if they exist, beside those that match `WATCHED`.
        known: The snapshot taken before, if any.
        cached: Its files; those that have not changed are not sent again.

    Raises:
        ConflictError: A file changed while it was read, or did not arrive as it was.
        OverlayError: There is no SGLang, or one without DFlash.
    """
    have = {p: d for p, d in (cached or {}).items() if _is_known(known, p, d)}
    reply = transport.call(
        "snapshot",
        {
            "wanted": sorted(wanted),
            "mention": WATCHED.pattern.decode(),
            "known": {path: sha256(data) for path, data in have.items()},
        },
    )
    result = reply.result
    if result["left"]:
        names = listed(result["left"], 3)
        transport.warnings.append(f"left over from an earlier deployment, and no part of the base: {names}")
    if not result["dflash"]:
        raise _no_dflash(result["versions"].get("sglang"), result["root"])
    arrived = _cut(reply.payload, result["sent"])
    files = {}
    for found in result["files"]:
        path = found["path"]
        files[path] = arrived[path] if path in arrived else have[path]
        if sha256(files[path]) != found["sha256"]:
            raise ConflictError(
                f"{path} did not arrive as it is on {transport.name}",
                why=f"{len(files[path])} of {found['size']} bytes",
                next_step=f"ddtree-overlay snapshot {transport.target}",
            )
    return _manifest(name, result, len(arrived)), files


def snapshot_root(
    root: Path,
    name: str,
    wanted: Collection[str],
    *,
    known: Manifest | None = None,
    cached: Mapping[str, bytes] | None = None,
) -> Snapshot:
    """Take a snapshot of a package folder, or of a site-packages folder or checkout that holds one.

    Raises as `snapshot_host`.
    """
    host = Host(name=name, address="localhost", transport="local", root=str(root.resolve()))
    with open_transport(host) as transport:
        return snapshot_host(transport, name, wanted, known=known, cached=cached)


def snapshot_release(
    version: str,
    cache: Path,
    wanted: Collection[str],
    *,
    known: Manifest | None = None,
    cached: Mapping[str, bytes] | None = None,
) -> Snapshot:
    """Take a snapshot of the published wheel of SGLang `version`, which pip fetches into `cache`.

    Raises:
        OverlayError: The release has no DFlash, or pip cannot get it.
        ConflictError: The unpacked wheel was changed since it was unpacked.
    """
    check_release_name(version)
    folder = fetch_release(version, cache)
    manifest, files = snapshot_root(folder, f"sglang-{version}", wanted, known=known, cached=cached)
    check_release(folder, files)
    return manifest, files


def check_release_name(version: str) -> None:
    """Refuse what is no release with DFlash, before anything is downloaded.

    Raises:
        OverlayError: The release has no DFlash, or is none that pip could have.
    """
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if numbers and tuple(int(n) for n in numbers.groups()) < FIRST_WITH_DFLASH:
        raise _no_dflash(version, "the published wheel")
    if not re.fullmatch(r"\d+(\.\w+)*(\+[\w.]+)?", version, re.ASCII):
        # No version at all: it cannot be tried out either.
        raise unsupported(version)


def _is_known(known: Manifest | None, path: str, data: bytes) -> bool:
    entry = known.entry(path) if known else None
    return entry is not None and entry.sha256 == sha256(data)


def _cut(payload: bytes, sent: list[dict[str, Any]]) -> dict[str, bytes]:
    files, at = {}, 0
    for item in sent:
        files[item["path"]] = payload[at : at + item["size"]]
        at += item["size"]
    return files


def _manifest(name: str, result: Mapping[str, Any], transferred: int) -> Manifest:
    entries = tuple(FileEntry(**{k: v for k, v in f.items() if k != "owner"}) for f in result["files"])
    facts = {
        "transferred": transferred,
        "unchanged": len(entries) - transferred,
        "bytes": sum(e.size for e in entries),
        "seen": result["seen"],
        "python_executable": (result["interpreter"] or {}).get("executable"),
    }
    return Manifest(
        name=name,
        root=result["root"],
        install=result["install"],
        versions=result["versions"],
        files=entries,
        mentions=tuple(result["mentions"]),
        facts=facts,
    )


def _no_dflash(version: str | None, where: str) -> OverlayError:
    from ddtree_overlay.patching import SUPPORTED_RELEASES

    oldest = ".".join(map(str, FIRST_WITH_DFLASH))
    newest = SUPPORTED_RELEASES[-1]
    return OverlayError(
        f"SGLang {version or 'of unknown version'} has no DFlash, which DDTREE builds on ({where})",
        why=f"DFlash came with SGLang {oldest}; supported: {', '.join(SUPPORTED_RELEASES)}",
        next_step=f"pip install sglang=={newest}  # on the host\nddtree-overlay snapshot --release {newest}",
    )
