# SPDX-License-Identifier: Apache-2.0
"""Snapshots of a real SGLang 0.5.11: complete, exact, incremental, and refused when something changes meanwhile."""

from __future__ import annotations

import os
import shutil

import pytest
from tests.support.agents import sabotaged

from ddtree_overlay import snapshots, wheels
from ddtree_overlay.errors import ConflictError, OverlayError
from ddtree_overlay.hosts.protocol import Reply
from ddtree_overlay.manifest import Manifest, sha256
from ddtree_overlay.verify.mentions import WATCHED


WANTED = ["srt/server_args.py", "srt/speculative/dflash_worker.py", "srt/not/there.py"]


def test_snapshot_holds_what_was_asked_for_and_every_mention(sglang, here):
    """Wanted files that exist, and each module below srt/ that names DFlash or a field with a second meaning."""
    manifest, files = snapshots.snapshot_host(here, "ct200", [*WANTED, "srt/environ.py"])
    mentions = {
        p.relative_to(sglang.root).as_posix()
        for p in (sglang.root / "srt").rglob("*.py")
        if WATCHED.search(p.read_bytes())
    }
    assert set(manifest.mentions) == mentions
    assert set(files) == {f.path for f in manifest.files} == {*mentions, "srt/environ.py"}
    assert all(data == (sglang.root / path).read_bytes() for path, data in files.items())


def test_manifest_describes_install_and_files(sglang, here):
    """Versions, install kind, root, and digest, mode, owner and link count of each file."""
    data = (sglang.root / "srt/environ.py").read_bytes()
    (sglang.root / "srt/environ.py").unlink()
    (sglang.root / "srt/environ.py").write_bytes(data)
    os.chmod(sglang.root / "srt/environ.py", 0o640)
    manifest, files = snapshots.snapshot_host(here, "ct200", ["srt/environ.py"])
    assert (manifest.name, manifest.root, manifest.install) == ("ct200", str(sglang.root), "wheel")
    assert manifest.release == "0.5.11"
    assert manifest.versions["python"]
    assert manifest.versions["torch"] is None
    entry = manifest.entry("srt/environ.py")
    st = os.stat(sglang.root / "srt/environ.py")
    assert entry is not None
    assert (entry.mode, entry.uid, entry.gid, entry.nlink) == (0o640, st.st_uid, st.st_gid, st.st_nlink)
    assert (entry.size, entry.sha256) == (st.st_size, sha256(files["srt/environ.py"]))
    assert Manifest.from_json(manifest.to_json()) == manifest


def test_unchanged_files_are_not_sent_again(sglang, here):
    """The second snapshot transfers only what changed; the result is as complete as the first."""
    manifest, files = snapshots.snapshot_host(here, "x", WANTED)
    again, same = snapshots.snapshot_host(here, "x", WANTED, known=manifest, cached=files)
    assert (again.facts["transferred"], again.facts["unchanged"]) == (0, len(files))
    assert same == files
    target = sglang.root / WANTED[0]
    data = target.read_bytes()
    target.unlink()
    target.write_bytes(data + b"# more\n")
    third, newer = snapshots.snapshot_host(here, "x", WANTED, known=manifest, cached=files)
    assert third.facts["transferred"] == 1
    assert newer[WANTED[0]] == data + b"# more\n"


def test_a_damaged_cache_is_not_trusted(here):
    """A cached file that is not what the manifest says is fetched again."""
    manifest, files = snapshots.snapshot_host(here, "x", WANTED)
    cached = {**files, WANTED[0]: files[WANTED[0]][:-10]}
    again, same = snapshots.snapshot_host(here, "x", WANTED, known=manifest, cached=cached)
    assert again.facts["transferred"] == 1
    assert same == files


def test_a_file_that_changes_while_it_is_read_is_an_error(tiny, near, monkeypatch):
    """Something edits the package during the snapshot: refused, never half old and half new.

    It ends as it began, so that comparing bytes alone would not notice.
    """
    (tiny.root / "srt/speculative").mkdir()
    (tiny.root / "srt/speculative/dflash_worker.py").write_bytes(b"DFLASH = 1\n")
    edited = tiny.root / "srt/a.py"
    edit = f"open({str(edited)!r}, 'r+b').write({edited.read_bytes()!r})"
    with (
        sabotaged(monkeypatch, "reading", "entry", 2, edit),
        pytest.raises(ConflictError, match=r"srt/a\.py changed while it was read"),
    ):
        snapshots.snapshot_host(near, "x", ["srt/a.py"])
    manifest, _ = snapshots.snapshot_host(near, "x", ["srt/a.py"])
    assert manifest.entry("srt/a.py") is not None


def test_a_payload_that_does_not_match_its_digests_is_refused(here):
    """Bytes that were altered on their way are noticed although their number is right."""

    class Altering:
        name, target, warnings = "ct200", "--host ct200", ()

        def call(self, op, args, payload=b"", *, timeout=None):
            reply = here.call(op, args, payload, timeout=timeout)
            return Reply(reply.result, b"X" + reply.payload[1:])

    with pytest.raises(ConflictError, match="did not arrive as it is"):
        snapshots.snapshot_host(Altering(), "x", WANTED)


def test_release_snapshot_equals_the_installed_one(here, wheel_site):
    """A snapshot of the published wheel and one of a host have the same digests."""
    released, files = snapshots.snapshot_release("0.5.11", wheel_site.parents[1], WANTED)
    installed, same = snapshots.snapshot_host(here, "x", WANTED)
    assert released.name == "sglang-0.5.11"
    assert files == same
    assert {f.path: f.sha256 for f in released.files} == {f.path: f.sha256 for f in installed.files}


def test_a_changed_copy_of_the_wheel_is_noticed(tmp_path, wheel_site):
    """Every file of a release is compared with the wheel's own list of digests."""
    copy = tmp_path / "wheels/sglang-0.5.11"
    shutil.copytree(wheel_site, copy, copy_function=os.link)
    target = copy / "sglang" / WANTED[0]
    data = target.read_bytes()
    target.unlink()
    target.write_bytes(data[:-100])
    with pytest.raises(ConflictError, match=r"srt/server_args\.py is not what was published"):
        snapshots.snapshot_release("0.5.11", tmp_path, WANTED)


def test_a_release_that_pip_cannot_get(tmp_path):
    """The words of pip are passed on, with the command that shows all of them."""
    with pytest.raises(OverlayError, match=r"pip cannot get sglang 99\.0\.0") as caught:
        wheels.wheel_of("99.0.0", tmp_path)
    assert "No matching distribution" in caught.value.why
    assert "from versions" not in caught.value.why
    assert "pip download" in caught.value.next_step
