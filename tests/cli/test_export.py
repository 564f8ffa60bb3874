# SPDX-License-Identifier: Apache-2.0
"""`export`: what is written, what it replaces and what it refuses."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys

import pytest
from tests.support.commands import clean_environ
from tests.support.trees import differences, listing


@pytest.mark.parametrize("form", ["dir", "tar", "dockerfile"])
def test_an_export_is_written_once_and_then_left_alone(run, ready, tmp_path, form):
    """The same bundle again changes no byte and no time stamp, so a build cache stays valid."""
    words = ("export", *ready, "--format", form, "--out", str(tmp_path / "out"), "--json")
    first = run(*words)
    assert (first.code, first.json["changed"], first.json["out"]) == (0, True, str(tmp_path / "out")), first.err
    before, stamp = listing(tmp_path), (tmp_path / "out").stat()
    again = run(*words)
    assert (again.code, again.json["changed"]) == (0, False)
    assert differences(before, listing(tmp_path)) == []
    assert ((tmp_path / "out").stat().st_ino, (tmp_path / "out").stat().st_mtime_ns) == (
        stamp.st_ino,
        stamp.st_mtime_ns,
    )


def test_an_export_can_be_read_by_everybody_whatever_the_umask(run, ready, tmp_path):
    """COPY keeps the modes: with private folders an image whose USER is not root could not run it (OpenShell#475)."""
    before = os.umask(0o077)
    try:
        assert run("export", *ready, "--format", "dockerfile", "--out", str(tmp_path / "out")).code == 0
    finally:
        os.umask(before)
    modes = {p.stat().st_mode & 0o777 for p in [tmp_path / "out", *(tmp_path / "out").rglob("*")] if p.is_dir()}
    assert modes == {0o755}


def test_an_export_of_another_kind_replaces_an_earlier_one(run, ready, exported):
    """What an export wrote may be replaced by an export, and nothing of the old one stays."""
    assert (exported / "Dockerfile").is_file()
    assert run("export", *ready, "--out", str(exported), "--format", "dir").code == 0
    assert {p.name for p in exported.iterdir()} == {"apply.py", "ddtree_agent", "layer", "manifest.json"}
    assert sorted(exported.parent.glob(".export*")) == []


def spoil_with_a_file(folder):
    (folder / "notes.txt").write_text("mine")


def spoil_with_an_edit(folder):
    (folder / "apply.py").write_text("# mine\n")


def spoil_with_an_empty_folder(folder):
    (folder / "mine").mkdir()


def spoil_with_a_link(folder):
    (folder / "apply.py").rename(folder.parent / "apply.py")
    (folder / "apply.py").symlink_to("../apply.py")


def spoil_the_mark(folder):
    (folder / "manifest.json").write_text("{}")


def be_a_file(folder):
    shutil.rmtree(folder)
    folder.write_text("mine")


@pytest.mark.parametrize(
    "spoil",
    [
        spoil_with_a_file,
        spoil_with_an_edit,
        spoil_with_an_empty_folder,
        spoil_with_a_link,
        spoil_the_mark,
        be_a_file,
    ],
)
def test_what_no_export_wrote_is_never_replaced(run, ready, exported, spoil):
    """A file, an edit, a folder or a link of somebody else's: exit 1, named, and nothing is touched."""
    spoil(exported)
    form = "tar" if spoil is be_a_file else "dir"
    before = listing(exported.parent)
    done = run("export", *ready, "--format", form, "--out", str(exported))
    assert done.code == 1, done.err
    assert f"{exported} is no earlier export" in done.err
    assert "name another --out" in done.err
    assert differences(before, listing(exported.parent)) == []


@pytest.mark.parametrize("form", ["dockerfile", "tar"])
def test_an_export_is_written_whole_or_not_at_all(run, workspace, ready, tmp_path, form):
    """A write that fails half-way leaves the earlier export as it was, and no temporary behind."""
    out = tmp_path / "out"
    first = "dir" if form == "dockerfile" else "tar"
    assert run("export", *ready, "--format", first, "--out", str(out)).code == 0
    if form == "tar":
        # An export of another version: the same with other bytes.
        out.write_bytes(out.read_bytes().replace(b"ddtree-overlay 0.1.0", b"ddtree-overlay 9.9.9"))
    before = listing(tmp_path)
    command = [sys.executable, "-m", "ddtree_overlay", "export", *ready, "--format", form, "--out", out]
    done = subprocess.run(
        ["prlimit", "--fsize=20000", *command],
        cwd=workspace,
        env=clean_environ(tmp_path / "home"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "File too large" in done.stderr
    assert differences(before, listing(tmp_path)) == []


def test_a_snapshot_without_a_bundle_is_refused_with_the_next_command(run, workspace, ready):
    """Exit 1: `patch` comes first."""
    shutil.rmtree(workspace / "build")
    done = run("export", *ready, "--format", "dir", "--out", "x")
    assert done.code == 1
    assert f"next: ddtree-overlay patch --root {ready[1]}" in done.err


def test_a_missing_parent_folder_is_refused(run, ready):
    """Exit 2, with the command that makes it."""
    done = run("export", *ready, "--format", "tar", "--out", "/nonexistent/a b/x.tar")
    assert done.code == 2
    assert "next: mkdir -p '/nonexistent/a b'" in done.err


def test_several_hosts_have_one_export_or_none(run, workspace, prepared, tmp_path):
    """Hosts with one base share an export; with different ones nothing is written, instead of whichever came last."""
    with (workspace / "deploy.toml").open("a") as stream:
        stream.write('[hosts.ct201]\naddress = "127.0.0.1"\n')
    shutil.copytree(prepared / "build", workspace / "build")
    for name in ("ct200", "ct201"):
        shutil.copytree(next((prepared / "snapshots").iterdir()), workspace / "snapshots" / name)
    words = ("export", "--host", "ct200", "--host", "ct201", "--format", "tar", "--out", str(tmp_path / "x.tar"))
    done = run(*words)
    assert done.code == 0, done.err
    assert "ct200, ct201: overlay" in done.out
    (tmp_path / "x.tar").unlink()
    manifest = workspace / "snapshots/ct201/manifest.json"
    other = json.loads(manifest.read_text())
    patched = json.loads(next((workspace / "build").glob("*/bundle.json")).read_text())["changes"]
    edited = next(f for f in other["files"] if f["path"] == "srt/server_args.py")
    assert edited["path"] in {c["path"] for c in patched}
    text = (workspace / "snapshots/ct201/files/srt/server_args.py").read_bytes() + b"# other\n"
    (workspace / "snapshots/ct201/files/srt/server_args.py").write_bytes(text)
    edited |= {"sha256": hashlib.sha256(text).hexdigest(), "size": len(text)}
    manifest.write_text(json.dumps(other))
    assert run("patch", "--host", "ct201").code == 0
    done = run(*words)
    assert done.code == 2, done.err
    assert "these hosts need different overlays" in done.err
    assert not (tmp_path / "x.tar").exists()
