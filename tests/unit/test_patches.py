# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import unidiff
from tests.support import small, wheels

from ddtree_overlay.patches import check_patches, render_patches, write_patches
from ddtree_overlay.patching import SUPPORTED_RELEASES, build, build_release, load_overlay, wanted_paths


PROJECT = Path(__file__).parents[2]


def built():
    return small.base(), build_release(small.RELEASE, small.base(), small.overlay())


def test_folder_is_written_and_up_to_date(tmp_path: Path):
    """A second run writes nothing."""
    folder = tmp_path / "patches"

    assert len(write_patches(folder, *built())) == len(small.RELEASE.edits) + 1
    assert write_patches(folder, *built()) == ()
    assert check_patches(folder, *built()) == ()
    assert sorted(p.name for p in folder.iterdir())[0] == "0001-spec_info.patch"


@pytest.mark.parametrize("name", ["0002-server_args.patch", "series"])
def test_stale_missing_and_extra_files_are_told_apart(tmp_path: Path, name: str):
    """Each kind has its own sentence, and writing heals all of them."""
    write_patches(tmp_path, *built())
    (tmp_path / name).write_bytes(b"edited\n")
    (tmp_path / "0001-spec_info.patch").unlink()
    (tmp_path / "0009-old.patch").write_bytes(b"")

    problems = check_patches(tmp_path, *built())

    assert [p.partition(":")[0] for p in problems] == ["missing", "stale", "extra"]
    assert len(write_patches(tmp_path, *built())) == 3
    assert check_patches(tmp_path, *built()) == ()


def test_foreign_files_are_left_alone(tmp_path: Path):
    """A README beside the patches is nobody's business."""
    (tmp_path / "README.md").write_text("ours")
    write_patches(tmp_path, *built())

    assert (tmp_path / "README.md").exists()
    assert check_patches(tmp_path, *built()) == ()


def test_missing_folder_is_all_missing(tmp_path: Path):
    """Nothing is created by a check."""
    assert len(check_patches(tmp_path / "none", *built())) == len(small.RELEASE.edits) + 1
    assert not (tmp_path / "none").exists()


def test_patches_hold_no_upstream_line():
    """Only added lines, no context: what is committed is ours."""
    base, patched = built()
    for name, data in render_patches(base, patched).items():
        if name != "series":
            hunks = data[data.index(b"\n@@") :].split(b"\n")
            assert all(line.startswith((b"+", b"@@")) or not line for line in hunks), name


def test_header_is_dep_3_with_digests():
    """The fields a reader and a script look for, and nothing that changes from run to run."""
    base, patched = built()
    text = render_patches(base, patched)["0001-spec_info.patch"].decode()
    header = text[: text.index("diff --git")]
    change = next(c for c in patched.bundle.changes if c.path.endswith("spec_info.py"))

    assert header.startswith("Description: Register DDTREE")
    assert "\nOrigin: " in header
    assert "\nForwarded: not-needed\n" in header
    assert f"\nX-Base-SHA256: {change.base_sha256}\n" in header
    assert f"\nX-Result-SHA256: {change.sha256}\n" in header
    assert re.search(r"20\d\d-\d\d", header) is None


def test_series_names_patches_in_order_and_new_modules_by_digest():
    """The format of quilt: names, and comments for what is not a diff."""
    base, patched = built()
    files = render_patches(base, patched)
    lines = files["series"].decode().splitlines()

    assert [line for line in lines if line and not line.startswith("#")] == sorted(files.keys() - {"series"})
    assert all(f"# {c.sha256}  {c.path}" in lines for c in patched.bundle.changes if c.adds)


def test_git_applies_the_series_inside_another_repository(tmp_path: Path):
    """Applied below a repository, each patch changes its file, or nothing was proven (oven-sh/bun#35099, kata#3690)."""
    base, patched = built()
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True, timeout=200)
    site = tmp_path / "env" / "site-packages"
    for path, data in base.items():
        (site / "sglang" / path).parent.mkdir(parents=True, exist_ok=True)
        (site / "sglang" / path).write_bytes(data)
    environ = {**os.environ, "GIT_CEILING_DIRECTORIES": str(site.parent)}

    for name, diff in render_patches(base, patched).items():
        if name != "series":
            command = ["git", "apply", "--unidiff-zero", "-"]
            subprocess.run(command, cwd=site, input=diff, env=environ, check=True, timeout=200)

    for edit in small.RELEASE.edits:
        assert (site / "sglang" / edit.path).read_bytes() == patched.files[edit.path]


@pytest.mark.parametrize("version", SUPPORTED_RELEASES)
def test_committed_patches_are_up_to_date(version: str):
    """The folder in the repository is what `patch` would write; run it again when this fails (TorchSpec#98)."""
    _, base = wheels.snapshot(wanted_paths(load_overlay()), version)
    patched = build(base, version)
    folder = PROJECT / "patches" / f"sglang-{version}"

    assert check_patches(folder, base, patched) == ()
    for path in folder.glob("*.patch"):
        (entry,) = unidiff.PatchSet(path.read_text(encoding="utf-8"))
        assert entry.removed == 0
        assert entry.added > 0
