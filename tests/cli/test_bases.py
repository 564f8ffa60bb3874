# SPDX-License-Identifier: Apache-2.0
"""Snapshots that are no base to build on: patched, edited, damaged, or of another folder of that name."""

from __future__ import annotations

import hashlib
import json
import os
import shutil

import pytest
from tests.support.commands import refused
from tests.support.trees import differences, listing


def test_two_folders_of_one_name_keep_their_own_snapshots(run, patched_root, tmp_path, workspace):
    """Nearly every package folder is called sglang: the snapshot of one is not that of the other."""
    other = tmp_path / "other/sglang"
    shutil.copytree(patched_root, other, copy_function=os.link)
    assert run("snapshot", "--root", str(other)).code == 0

    names = sorted(p.name for p in (workspace / "snapshots").iterdir())
    assert [name.rpartition("-")[0] for name in names] == ["root-sglang", "root-sglang"]
    assert run("snapshot", "--root", str(other)).code == 0
    assert sorted(p.name for p in (workspace / "snapshots").iterdir()) == names


@pytest.mark.parametrize("damage", ["truncated", "modified"])
def test_damaged_snapshot_is_refused(run, patched_root, workspace, damage):
    """Exit 4, naming the file and the command that takes the snapshot again."""
    file = next((workspace / "snapshots").iterdir()) / "files/srt/server_args.py"
    file.write_bytes(file.read_bytes()[:1000] if damage == "truncated" else file.read_bytes() + b"#")

    refused(
        run("patch", "--root", str(patched_root)),
        4,
        "srt/server_args.py is truncated or was changed",
        "snapshot --root",
    )


def test_damaged_manifest_does_not_stop_a_new_snapshot(run, patched_root, workspace):
    """What every error about a snapshot advises must work: `snapshot` takes all files anew and says why."""
    manifest = next((workspace / "snapshots").iterdir()) / "manifest.json"
    listed = json.loads(manifest.read_bytes())["files"]
    manifest.write_text("{")
    done = run("snapshot", "--root", str(patched_root))
    assert done.code == 0, done.err
    assert "manifest.json is damaged: taking every file anew" in " ".join(done.err.split())
    assert [f["sha256"] for f in json.loads(manifest.read_bytes())["files"]] == [f["sha256"] for f in listed]


def test_modified_base_file_is_refused_and_nothing_is_written(run, patched_root, site):
    """Exit 4 when an installed file is neither base nor overlay (OBSong#85)."""
    file = patched_root / "srt/speculative/spec_info.py"
    data = file.read_bytes()
    file.unlink()
    file.write_bytes(data + b" ")
    before = listing(site)

    refused(run("push", "--root", str(patched_root), "--yes"), 4, "spec_info.py")
    refused(run("diff", "--root", str(patched_root)), 4, "spec_info.py")
    assert not differences(before, listing(site))


def test_bundle_for_another_release_is_refused_in_one_sentence(run, patched_root, site, apply):
    """Exit 4: which release the bundle is for and which one is there, not the digest of the first of many files."""
    metadata = site / "sglang-0.5.11.dist-info/METADATA"
    text = metadata.read_text("utf-8").replace("Version: 0.5.11\n", "Version: 0.5.17\n", 1)
    metadata.unlink()
    metadata.write_text(text, "utf-8")
    file = patched_root / "srt/speculative/spec_info.py"
    data = file.read_bytes()
    file.unlink()
    file.write_bytes(data.replace(b"import", b"import ", 1)[: len(data)])
    before = listing(site)
    root = f"--root {patched_root}"

    said = "error: the bundle is for SGLang 0.5.11, the host has 0.5.17\n"
    step = f"next: ddtree-overlay snapshot {root} && ddtree-overlay patch {root} && ddtree-overlay push {root}"
    refused(run("push", "--root", str(patched_root), "--yes"), 4, said, step)
    refused(run("diff", "--root", str(patched_root)), 4, "is for SGLang 0.5.11, the host has 0.5.17")
    refused(apply("push"), 4, said, "then export it for the SGLang here")
    assert not differences(before, listing(site))


def test_snapshot_of_a_patched_install_is_refused_and_the_base_is_kept(run, patched_root, workspace):
    """Exit 4: the good snapshot is not replaced by one of patched files, and what is built on it still works."""
    root = str(patched_root)
    assert run("push", "--root", root, "--yes").code == 0
    before = listing(workspace)

    again = f"ddtree-overlay patch --root {root}  # builds on the kept snapshot"
    undo = f"ddtree-overlay rollback --root {root} --to base"
    refused(run("snapshot", "--root", root), 4, "carries an overlay (d-0001)", "the base snapshot of ", again, undo)
    assert not differences(before, listing(workspace))
    shutil.rmtree(workspace / "snapshots")
    refused(run("snapshot", "--root", root), 4, "there is no earlier snapshot", f"next: {undo}")
    assert run(*undo.split()[1:], "--yes").code == 0
    assert run("snapshot", "--root", root).code == 0


def test_partly_patched_install_is_no_base(run, patched_root, workspace):
    """One edited file among pristine ones is enough, although no deployment is recorded."""
    file = patched_root / "srt/server_args.py"
    patched = next((workspace / "build").glob("*/files/srt/server_args.py")).read_bytes()
    file.unlink()
    file.write_bytes(patched)

    refused(
        run("snapshot", "--root", str(patched_root)),
        4,
        "srt/server_args.py: it holds all of",
        "pip install --force-reinstall",
    )


def test_snapshot_of_patched_files_from_before_is_refused_by_patch_and_verify(run, patched_root, workspace):
    """Exit 4 with one message, not with a finding for each insertion that is there twice."""
    folder = next((workspace / "snapshots").iterdir())
    data = next((workspace / "build").glob("*/files/srt/server_args.py")).read_bytes()
    (folder / "files/srt/server_args.py").write_bytes(data)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    entry = next(f for f in manifest["files"] if f["path"] == "srt/server_args.py")
    entry.update(sha256=hashlib.sha256(data).hexdigest(), size=len(data))
    (folder / "manifest.json").write_text(json.dumps(manifest))

    for verb in ("patch", "verify"):
        undo = f"next: ddtree-overlay rollback --root {patched_root} --to base"
        refused(run(verb, "--root", str(patched_root)), 4, "srt/server_args.py is already patched", undo)
