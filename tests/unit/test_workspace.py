# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ddtree_overlay.errors import ConflictError, OverlayError, UsageError
from ddtree_overlay.manifest import Bundle, Change, FileEntry, Manifest, sha256
from ddtree_overlay.workspace import Workspace


FILES = {"srt/a.py": b"a = 1\n", "srt/deep/b.py": b"b = 2\r\n"}


def manifest(files: dict[str, bytes], name: str = "ct200") -> Manifest:
    entries = tuple(FileEntry(p, sha256(d), len(d)) for p, d in sorted(files.items()))
    return Manifest(name, "/opt/sglang", "wheel", {"sglang": "0.5.11"}, entries)


def bundle(base: bytes, result: bytes, path: str = "srt/a.py") -> tuple[Bundle, dict[str, bytes]]:
    return Bundle("0.5.11", (Change(path, sha256(base), sha256(result), 1, 0),)), {path: result}


def listing(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_workspace_is_the_nearest_parent_with_deploy_toml(tmp_path):
    """A command works from any folder below the configuration."""
    (tmp_path / "deploy.toml").touch()
    (tmp_path / "a/b").mkdir(parents=True)

    assert Workspace.find(tmp_path / "a/b").root == tmp_path.resolve()


def test_workspace_without_deploy_toml_is_the_start_itself(tmp_path):
    """Without a configuration nothing is looked for above the current folder."""
    assert Workspace.find(tmp_path).root == tmp_path.resolve()
    assert Workspace.find(tmp_path).config_path is None


def test_missing_workdir_is_refused(tmp_path):
    """A workdir that does not exist is a usage error, not a new folder."""
    with pytest.raises(UsageError, match="no such folder"):
        Workspace.find(tmp_path / "none")


def test_snapshot_comes_back_byte_for_byte(tmp_path):
    """What is loaded equals what was saved, line endings included, with no temporary file left."""
    space = Workspace(tmp_path)
    space.save_snapshot(manifest(FILES), FILES)

    assert space.load_snapshot("ct200") == (manifest(FILES), FILES)
    assert set(listing(tmp_path / "snapshots/ct200")) == {"manifest.json", "files/srt/a.py", "files/srt/deep/b.py"}


@pytest.mark.parametrize("damage", ["truncate", "change", "remove"])
def test_damaged_snapshot_is_refused_and_named(tmp_path, damage):
    """A truncated, changed or missing file is a conflict that names the file and the command to repeat."""
    space = Workspace(tmp_path)
    space.save_snapshot(manifest(FILES), FILES)
    file = tmp_path / "snapshots/ct200/files/srt/a.py"
    if damage == "truncate":
        file.write_bytes(FILES["srt/a.py"][:3])
    elif damage == "change":
        file.write_bytes(b"a = 2\n")
    else:
        file.unlink()

    with pytest.raises(ConflictError, match=r"srt/a\.py") as caught:
        space.load_snapshot("ct200")
    assert caught.value.next_step == "ddtree-overlay snapshot {target}"
    assert set(space.cached_files(manifest(FILES))) == {"srt/deep/b.py"}


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"schema": 99}', b'{"schema": 1}'])
def test_damaged_manifest_is_refused(tmp_path, text):
    """A manifest that cannot be read never becomes an empty one."""
    space = Workspace(tmp_path)
    folder = space.save_snapshot(manifest(FILES), FILES)
    (folder / "manifest.json").write_bytes(text)

    with pytest.raises(ConflictError, match="damaged"):
        space.load_snapshot("ct200")


def test_missing_snapshot_names_the_command_that_makes_it(tmp_path):
    """A step that was skipped is named; whoever knows the target puts it in its place."""
    with pytest.raises(OverlayError, match="there is no snapshot of ct200") as caught:
        Workspace(tmp_path).load_snapshot("ct200")
    assert caught.value.next_step == "ddtree-overlay snapshot {target}"


def test_new_snapshot_drops_files_of_the_old_one(tmp_path):
    """A file that the package no longer has does not stay behind."""
    space = Workspace(tmp_path)
    space.save_snapshot(manifest(FILES), FILES)
    fewer = {"srt/a.py": FILES["srt/a.py"]}
    space.save_snapshot(manifest(fewer), fewer)

    assert set(listing(tmp_path / "snapshots/ct200/files")) == {"srt/a.py"}


@pytest.mark.parametrize("path", ["../evil", "/etc/passwd", "srt/../../evil", ""])
def test_path_that_leaves_the_package_is_refused(tmp_path, path):
    """A manifest comes from another machine and must not choose where files are written."""
    with pytest.raises(ConflictError, match="leaves the package folder"):
        Workspace(tmp_path / "w").save_snapshot(manifest({path: b"x"}), {path: b"x"})


def test_bundle_is_chosen_by_digests(tmp_path):
    """The bundle of another base is never taken, however new it is."""
    space = Workspace(tmp_path)
    mine = space.save_bundle(*bundle(b"base\n", b"patched\n"))
    space.save_bundle(*bundle(b"other\n", b"other patched\n"))

    assert space.bundle_for({"srt/a.py": sha256(b"base\n")}) == mine
    assert space.bundle_for({"srt/a.py": sha256(b"patched\n")}) == mine
    assert space.bundle_for({"srt/a.py": sha256(b"drifted\n")}) is None
    assert space.bundle_for({"srt/a.py": None}) is None
    assert mine.files() == {"srt/a.py": b"patched\n"}


def test_newest_bundle_of_a_base_wins_even_when_an_older_one_is_live(tmp_path):
    """After an overlay change the new result is meant, also while the old one is still on the host."""
    space = Workspace(tmp_path)
    old, new = bundle(b"base\n", b"first\n"), bundle(b"base\n", b"second\n")
    space.save_bundle(*old)
    stamp = tmp_path / "build" / old[0].overlay_id / "bundle.json"
    os.utime(stamp, ns=(1, 1))
    second = space.save_bundle(*new)

    assert space.bundle_for({"srt/a.py": sha256(b"first\n")}) == second
    os.utime(second.folder / "bundle.json", ns=(2, 2))
    assert space.save_bundle(*old) == space.bundle_for({"srt/a.py": sha256(b"second\n")})


def test_damaged_bundle_is_refused(tmp_path):
    """Neither a changed bundle.json nor a changed patched file is ever pushed."""
    space = Workspace(tmp_path)
    stored = space.save_bundle(*bundle(b"base\n", b"patched\n"))
    (stored.folder / "files/srt/a.py").write_bytes(b"patch")
    with pytest.raises(ConflictError, match="truncated or was changed"):
        stored.files()

    path = stored.folder / "bundle.json"
    path.write_bytes(path.read_bytes().replace(b'"added": 1', b'"added": 1,'))
    with pytest.raises(ConflictError, match="damaged"):
        space.load_bundles()


@pytest.mark.parametrize("change", [{"release": "0.5.12"}, {"base_id": "0" * 12}, {"extra": 1}, {"checksum": None}])
def test_bundle_that_was_edited_is_refused(tmp_path, change):
    """Also what the overlay id does not cover: the release decides which edits and sites `verify` goes by."""
    space = Workspace(tmp_path)
    path = space.save_bundle(*bundle(b"base\n", b"patched\n")).folder / "bundle.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | change))

    with pytest.raises(ConflictError, match="damaged") as caught:
        space.load_bundles()
    assert "checksum" in caught.value.why
    assert str(path.parent) in caught.value.next_step
