# SPDX-License-Identifier: Apache-2.0
"""What a snapshot knows about an installed SGLang, and what a bundle changes in it. Pure data, no I/O."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


SCHEMA = 1
#: The module that tells a running server which overlay it has loaded. Each bundle has its own, made from the bundle's
#: id; so the id is that of all the other changes.
OVERLAY_ID_PATH = "srt/speculative/ddtree/overlay_id.py"


def sha256(data: bytes) -> str:
    """Hex sha256 of `data`."""
    return hashlib.sha256(data).hexdigest()


def canonical_json(value: object) -> bytes:
    """`value` as JSON with sorted keys and a final newline: equal values give equal bytes."""
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


@dataclass(frozen=True, slots=True, order=True)
class FileEntry:
    """One file of the installed package; `path` is POSIX and relative to the package root (`srt/server_args.py`)."""

    path: str
    sha256: str
    size: int
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    nlink: int = 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """An installed SGLang as seen on a host or in a wheel.

    `versions` maps a distribution (`sglang`, `python`, `torch`, `cuda`, `sglang-kernel`, `flashinfer-python`, `triton`,
    `transformers`) to its version, or to None when it is not installed. `install` is one of `wheel`, `editable`,
    `symlinked`, `user-site`, `unpacked`. `mentions` lists every file of the package that names DFlash or a field that
    DDTREE gives another meaning to.
    """

    name: str
    root: str
    install: str
    versions: Mapping[str, str | None]
    files: tuple[FileEntry, ...]
    mentions: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def release(self) -> str:
        """The SGLang version."""
        return self.versions.get("sglang") or "unknown"

    def entry(self, path: str) -> FileEntry | None:
        """The entry of `path`, or None."""
        return next((f for f in self.files if f.path == path), None)

    def to_json(self) -> bytes:
        """Canonical bytes of `manifest.json`."""
        return canonical_json({"schema": SCHEMA, **asdict(self)})

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """Read `manifest.json`.

        Raises:
            ValueError: The bytes are not a manifest of this schema.
        """
        raw = json.loads(data)
        if not isinstance(raw, dict) or raw.pop("schema", None) != SCHEMA:
            raise ValueError(f"not a manifest of schema {SCHEMA}")
        try:
            raw["files"] = tuple(FileEntry(**f) for f in raw["files"])
            raw["mentions"] = tuple(raw["mentions"])
            manifest = cls(**raw)
        except (KeyError, TypeError) as e:
            raise ValueError(f"a part is missing or of the wrong kind: {e}") from e
        manifest._check()
        return manifest

    def _check(self) -> None:
        texts: list[object] = [self.name, self.root, self.install, *self.mentions]
        numbers: list[object] = []
        for entry in self.files:
            texts += [entry.path, entry.sha256]
            numbers += [entry.size, entry.mode, entry.uid, entry.gid, entry.nlink]
        if not isinstance(self.versions, dict) or not isinstance(self.facts, dict):
            raise ValueError("`versions` and `facts` must be objects")
        texts += [version for version in self.versions.values() if version is not None]
        if not all(isinstance(text, str) for text in texts) or not all(type(n) is int for n in numbers):
            raise ValueError("a text or a number is of the wrong kind")


@dataclass(frozen=True, slots=True, order=True)
class Change:
    """One file that the overlay adds (`base_sha256` is None) or changes."""

    path: str
    base_sha256: str | None
    sha256: str
    added: int
    removed: int

    @property
    def adds(self) -> bool:
        """Whether the file is absent from the base."""
        return self.base_sha256 is None


@dataclass(frozen=True, slots=True)
class Bundle:
    """The patched result for one base: what `push` puts on every host whose files have the same digests."""

    release: str
    changes: tuple[Change, ...]

    @property
    def overlay_id(self) -> str:
        """12 hex digits that name exactly this set of changes on exactly this base."""
        return digest_of((c.path, c.base_sha256, c.sha256) for c in self.changes if c.path != OVERLAY_ID_PATH)

    @property
    def base_id(self) -> str:
        """12 hex digits that name the base: the digests of every file that is changed."""
        return digest_of((c.path, c.base_sha256) for c in self.changes if c.base_sha256 is not None)

    def rows(self) -> list[dict[str, Any]]:
        """Path, base digest and digest of each change, as the host takes them."""
        return [{"path": c.path, "base": c.base_sha256, "after": c.sha256} for c in self.changes]

    def to_json(self) -> bytes:
        """Canonical bytes of `bundle.json`; its checksum covers what the overlay id leaves out, as the release."""
        value = {
            "schema": SCHEMA,
            "release": self.release,
            "overlay_id": self.overlay_id,
            "base_id": self.base_id,
            "changes": [asdict(c) for c in self.changes],
        }
        return canonical_json({**value, "checksum": sha256(canonical_json(value))})

    @classmethod
    def from_json(cls, data: bytes) -> Bundle:
        """Read `bundle.json`.

        Raises:
            ValueError: The bytes are not a bundle of this schema, or were changed after it was made.
        """
        raw = json.loads(data)
        if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
            raise ValueError(f"not a bundle of schema {SCHEMA}")
        try:
            bundle = cls(raw["release"], tuple(Change(**c) for c in raw["changes"]))
            named = raw["overlay_id"]
        except (KeyError, TypeError) as e:
            raise ValueError(f"a part is missing or of the wrong kind: {e}") from e
        if bundle.overlay_id != named:
            raise ValueError(f"overlay id {named} does not belong to these changes ({bundle.overlay_id})")
        if json.loads(bundle.to_json()) != raw:
            raise ValueError("it was edited, or made by another version: its checksum does not fit")
        own = sha256(overlay_id_module(bundle.overlay_id))
        if any(c.path == OVERLAY_ID_PATH and c.sha256 != own for c in bundle.changes):
            raise ValueError(f"{OVERLAY_ID_PATH} does not name the overlay {bundle.overlay_id}")
        return bundle


def overlay_id_module(overlay_id: str) -> bytes:
    """The source of the module at `OVERLAY_ID_PATH`."""
    return f'''\
# SPDX-License-Identifier: Apache-2.0
"""Made by `ddtree-overlay patch`: names the overlay that this module came with."""

OVERLAY_ID = "{overlay_id}"
'''.encode()


def digest_of(rows: Iterable[tuple[object, ...]]) -> str:
    """12 hex digits over `rows`, in sorted order."""
    return sha256(canonical_json(sorted([list(r) for r in rows], key=str)))[:12]
