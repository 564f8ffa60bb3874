# SPDX-License-Identifier: Apache-2.0
"""From a base to a bundle and back: every edit and every new module of the overlay, all in memory, all or nothing."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ddtree_overlay import collector, receivers
from ddtree_overlay.diffs import count_inserted
from ddtree_overlay.edits.anchors import AnchorError
from ddtree_overlay.edits.base import Edit, Insertion
from ddtree_overlay.errors import ConflictError, OverlayError
from ddtree_overlay.manifest import OVERLAY_ID_PATH, Bundle, Change, overlay_id_module, sha256
from ddtree_overlay.modules import imports, paths_of
from ddtree_overlay.releases import KNOWN, RELEASES, Release, release


SUPPORTED_RELEASES = tuple(row.version for row in RELEASES)

#: No supported release speaks of DDTree: a base file that does is not pristine, whoever patched it.
_OURS = re.compile(rb"ddtree", re.IGNORECASE)


class AlreadyPatchedError(ConflictError):
    """The base already holds the overlay, or part of it; `path` is the first file that does."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(
            f"{path} is already patched; the base is needed",
            why=why,
            next_step="ddtree-overlay rollback {target} --to base && ddtree-overlay snapshot {target}",
        )
        self.path = path


@dataclass(frozen=True, slots=True)
class Patched:
    """A bundle and the bytes of every file it adds or changes."""

    bundle: Bundle
    files: dict[str, bytes]


def load_overlay(version: str | None = None) -> dict[str, bytes]:
    """The overlay's new modules for one release, by the package-relative path they land at.

    Args:
        version: A supported SGLang; default: the newest.

    Raises:
        OverlayError: This installation holds none, or the version is not supported.
    """
    return modules_of(RELEASES[-1] if version is None else release(version))


def modules_of(row: Release) -> dict[str, bytes]:
    """As `load_overlay`, for one row of the release table: what every release has, and the row's variants over it."""
    here = Path(__file__).resolve().parent
    for root in (here / "_overlay", here.parents[1] / "overlay"):
        files = dict(_modules(root / "srt", root))
        for variant in row.variants:
            files.update(_modules(root / "variants" / variant, root / "variants" / variant))
        if files:
            return dict(sorted(files.items()))
    raise OverlayError("the overlay's modules are missing", next_step="install ddtree-overlay again")


def _modules(folder: Path, root: Path) -> Iterator[tuple[str, bytes]]:
    for path in folder.rglob("*.py"):
        if "__pycache__" not in path.parts:
            yield path.relative_to(root).as_posix(), path.read_bytes()


def every_module() -> dict[str, bytes]:
    """The modules of every release by path; of a module that releases have variants of, any of them."""
    modules: dict[str, bytes] = {}
    for row in KNOWN:
        modules |= modules_of(row)
    return modules


def wanted_paths(overlay: Mapping[str, bytes] | None = None) -> frozenset[str]:
    """Every path a snapshot must hold if it exists: what is edited, imported or looked up, and where modules will land.

    Args:
        overlay: The new modules; default: those of every release, for a snapshot is taken before its release is known.
    """
    code = set(overlay.items()) if overlay is not None else {item for row in KNOWN for item in modules_of(row).items()}
    wanted = {OVERLAY_ID_PATH, *receivers.paths(), *(path for path, _ in code)}
    for edit in (edit for row in KNOWN for edit in row.edits):
        wanted.add(edit.path)
        code |= {(edit.path, insertion.code.encode()) for insertion in edit.insertions}
    for path, source in code:
        for taken in imports(ast.parse(source), path):
            wanted.update(paths_of(taken.module))
            if taken.name not in (None, "*"):
                wanted.update(paths_of(f"{taken.module}.{taken.name}"))
    return frozenset(wanted)


def build(base: Mapping[str, bytes], version: str, *, overlay: Mapping[str, bytes] | None = None) -> Patched:
    """Patch a base.

    Args:
        base: The snapshot's files by package-relative path.
        version: The SGLang version they belong to.
        overlay: The new modules; default: ours for that version.

    Raises:
        AnchorError: An edit does not fit its file.
        AlreadyPatchedError: The base is not pristine.
        OverlayError: The version is not supported, or a file is missing from the base.
    """
    return build_release(release(version), base, load_overlay(version) if overlay is None else overlay)


@collector.paused()
def build_release(row: Release, base: Mapping[str, bytes], added: Mapping[str, bytes]) -> Patched:
    """Patch a base with the edits of one row of the release table. Raises as `build`."""
    _refuse_present(base, added)
    files: dict[str, bytes] = {}
    changes: list[Change] = []
    for edit in row.edits:
        before = base.get(edit.path)
        if before is None:
            raise OverlayError(
                f"{edit.path} is missing from the snapshot",
                why=f"SGLang {row.version} has this file, and the overlay edits it",
                next_step="ddtree-overlay snapshot {target}  # takes it again",
            )
        _refuse_edited(edit, before)
        after = edit.apply(before)
        files[edit.path] = after
        lines = count_inserted(before, after)
        assert lines is not None, f"{edit.path}: an upstream line was lost"
        changes.append(Change(edit.path, sha256(before), sha256(after), lines, 0))
    named = {OVERLAY_ID_PATH: overlay_id_module(Bundle(row.version, tuple(changes + _additions(added))).overlay_id)}
    files.update(added)
    files.update(named)
    changes += _additions({**added, **named})
    return Patched(Bundle(row.version, tuple(sorted(changes, key=lambda c: c.path))), files)


def check_pristine(base: Mapping[str, bytes], *, overlay: Mapping[str, bytes] | None = None) -> None:
    """Refuse a base that holds the overlay, or part of it.

    Raises:
        AlreadyPatchedError: A file is the overlay's, or was edited by it.
    """
    _refuse_present(base, every_module() if overlay is None else overlay)
    for edit in dict.fromkeys(edit for row in KNOWN for edit in row.edits):
        if edit.path in base:
            _refuse_edited(edit, base[edit.path])


def unpatch(patched: bytes, path: str, version: str | None = None) -> bytes:
    """The exact base bytes of an edited file, worked out from the edit alone.

    Args:
        patched: The file as the overlay left it.
        path: Package-relative.
        version: The release it belongs to; default: whichever edit fits.

    Raises:
        AnchorError: The file is not what the edit made of any base.
        OverlayError: The overlay does not edit this file.
    """
    rows = RELEASES if version is None else (release(version),)
    edits = list(dict.fromkeys(edit for row in rows for edit in row.edits if edit.path == path))
    if not edits:
        raise OverlayError(
            f"{path} is not edited by the overlay", next_step="ddtree-overlay diff {target}  # lists what is"
        )
    failures: list[AnchorError] = []
    for edit in edits:
        try:
            return edit.remove(patched)
        except AnchorError as error:
            failures.append(error)
    raise failures[0]


def _refuse_edited(edit: Edit, before: bytes) -> None:
    if not _OURS.search(before):
        return
    present: tuple[Insertion, ...] = ()
    with contextlib.suppress(AnchorError):
        _, present = edit.plan(before)
    if not present:
        raise AlreadyPatchedError(
            edit.path, "it speaks of DDTree, but not in our words: another overlay, or another version of this one"
        )
    held = "all" if len(present) == len(edit.insertions) else f"{len(present)} of {len(edit.insertions)}"
    raise AlreadyPatchedError(edit.path, f"it holds {held} of the overlay's insertions")


def _additions(added: Mapping[str, bytes]) -> list[Change]:
    return [Change(path, None, sha256(data), data.count(b"\n"), 0) for path, data in added.items()]


def _refuse_present(base: Mapping[str, bytes], added: Mapping[str, bytes]) -> None:
    for path, data in {**added, OVERLAY_ID_PATH: b""}.items():
        if path in base:
            same = "is there already" if base[path] == data else "is there already, with other content"
            raise AlreadyPatchedError(path, f"a module of the overlay {same}")
