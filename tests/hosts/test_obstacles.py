# SPDX-License-Identifier: Apache-2.0
"""Things in the way of a change: found before anything is written, or put back without harm to anything else."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from tests.support.agents import sabotaged
from tests.support.installs import bundle_for
from tests.support.trees import differences, listing

from ddtree_overlay import deploy
from ddtree_overlay.errors import ConflictError, OverlayError, RollbackIncompleteError
from ddtree_overlay.hosts.transport import open_transport
from ddtree_overlay.snapshots import snapshot_host


RESULTS = {"srt/a.py": b"VALUE = 5\n", "srt/b.py": b"VALUE = 6\n", "srt/new/c.py": b"C = 1\n"}


def push(transport, tiny, results=RESULTS):
    bundle, files = bundle_for(tiny.root, results)
    return deploy.push(transport, deploy.plan_push(transport, bundle, files), files, operator="x")


def refused(transport, tiny, match):
    """The plan names it and the push refuses; not one byte is written."""
    before = listing(tiny.site)
    bundle, files = bundle_for(tiny.root, RESULTS)
    plan = deploy.plan_push(transport, bundle, files)
    with pytest.raises(OverlayError, match=match) as caught:
        deploy.push(transport, plan, files, operator="x")
    assert caught.value.exit_code == 1
    assert differences(before, listing(tiny.site)) == []


@pytest.mark.parametrize("name", ["srt/.b.py.ddtree-tmp", "srt/__pycache__/.b.cpython-399.pyc.ddtree-tmp"])
def test_a_folder_at_the_name_of_a_temporary_file_is_refused(tiny, near, name):
    """It could be neither replaced nor removed half-way through."""
    (tiny.root / "srt/__pycache__").mkdir()
    (tiny.root / "srt/__pycache__/b.cpython-399.pyc").write_bytes(b"compiled")
    (tiny.root / name).mkdir()
    refused(near, tiny, "a folder lies at the name")


def test_a_pipe_at_the_name_of_a_temporary_file_is_taken_away(tiny, near):
    """Opening it would wait for ever; it is removed like any left-over."""
    os.mkfifo(tiny.root / "srt/.a.py.ddtree-tmp")
    push(near, tiny)
    assert not list(tiny.root.rglob("*.ddtree-tmp"))


@pytest.mark.parametrize(
    ("flag", "path", "match"),
    [
        ("a", "srt", "srt is append-only"),
        ("i", "srt", "srt is immutable"),
        ("a", "srt/b.py", r"srt/b\.py is append-only"),
        ("i", "srt/__pycache__/b.cpython-399.pyc", "pyc is immutable"),
    ],
)
def test_what_chattr_forbids_is_found_before_anything_is_written(tiny, near, flag, path, match):
    """In an append-only folder files can be made but not replaced: half a push would have to be left behind."""
    (tiny.root / "srt/__pycache__").mkdir()
    (tiny.root / "srt/__pycache__/b.cpython-399.pyc").write_bytes(b"compiled")
    done = subprocess.run(["chattr", f"+{flag}", tiny.root / path], check=False, capture_output=True)
    if done.returncode:
        if os.environ.get("CI"):
            pytest.fail("chattr does not work here")
        pytest.skip("chattr needs root and a file system that keeps flags")
    try:
        refused(near, tiny, match)
    finally:
        subprocess.run(["chattr", f"-{flag}", tiny.root / path], check=True)


SPOILED = {
    "another file": "os.unlink(p); open(p, 'w').write('x'); os.link(p, '/PRECIOUS')",
    "a pipe": "os.unlink(p); os.mkfifo(p)",
    "a folder": "os.unlink(p); os.mkdir(p)",
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_what_cannot_be_put_back_can_be_by_the_printed_lines(tiny, near, tmp_path, monkeypatch, spoil):
    """Exit code 7 names the file; its lines give the tree back and write through no link (atomic-host-tests#155)."""
    folder = tiny.root / "srt"
    (folder / "b.py").rename(folder / "it's b.py")
    before = listing(tiny.root)
    precious = tmp_path / "precious"
    code = (
        f"import os; p = str(a[1]); {spoil.replace('/PRECIOUS', str(precious))}; raise OSError(5, 'Input/output error')"
    )
    with sabotaged(monkeypatch, "swap", "put", 2, code), pytest.raises(RollbackIncompleteError) as caught:
        push(near, tiny, {"srt/a.py": b"VALUE = 5\n", "srt/it's b.py": b"VALUE = 6\n"})
    assert caught.value.exit_code == 7
    assert "srt/it's b.py: " in caught.value.why
    assert "srt/a.py" not in caught.value.why
    manual = caught.value.next_step
    assert manual.startswith("# on the host:\n")
    subprocess.run(manual, shell=True, check=True)
    changed = differences(before, listing(tiny.root))
    assert [line for line in changed if "in-the-way" not in line] == []
    assert not precious.exists() or precious.read_text() == "x"
    assert deploy.status(near).state == "pristine"
    deploy.rollback(near, purge=True)
    assert not tiny.state.exists()


def test_the_next_contact_ends_a_rollback_that_could_not_be_ended(tiny, near, monkeypatch):
    """Exit code 7 at first; with the obstacle gone, a push puts the rest back, says so, and goes on."""
    before = listing(tiny.root)
    code = "import os; os.unlink(a[1]); os.mkfifo(a[1]); raise OSError(5, 'Input/output error')"
    with sabotaged(monkeypatch, "swap", "put", 2, code), pytest.raises(RollbackIncompleteError):
        push(near, tiny)
    with pytest.raises(OverlayError, match="not a regular file"):
        push(near, tiny)
    (tiny.root / "srt/b.py").unlink()
    (tiny.root / "srt/b.py").write_bytes(RESULTS["srt/b.py"])
    done = deploy.rollback(near, to="base")
    assert done.recovered == "the interrupted push of d-0001 was put back first"
    assert near.warnings == [done.recovered]
    assert differences(before, listing(tiny.root)) == []


def test_a_file_that_changes_during_the_swap_is_left_and_everything_else_put_back(tiny, near, monkeypatch):
    """It was not ours yet: exit code 4, not 7, and whoever wrote it keeps it."""
    before = listing(tiny.root)
    mine = tiny.root / "srt/b.py"
    code = f"open({str(mine)!r}, 'w').write('mine')"
    with sabotaged(monkeypatch, "swap", "put", 1, code), pytest.raises(ConflictError, match="changed during the swap"):
        push(near, tiny)
    assert mine.read_text() == "mine"
    mine.write_bytes(b"VALUE = 2\n")
    assert differences(before, listing(tiny.root)) == []


def test_files_of_an_upgrade_after_a_crash_are_none_of_ours(tiny, near, monkeypatch):
    """SGLang is upgraded over a half-done push: what is still ours goes, and the new version's files stay."""
    with sabotaged(monkeypatch, "swap", "put", 3), pytest.raises(OverlayError):
        push(near, tiny)
    (tiny.site / "sglang-0.5.11.dist-info").rename(tiny.site / "sglang-0.5.12.dist-info")
    metadata = tiny.site / "sglang-0.5.12.dist-info/METADATA"
    metadata.write_text(metadata.read_text().replace("0.5.11", "0.5.12"))
    for name, data in {"a": b"VALUE = 100\n", "b": b"VALUE = 200\n"}.items():
        (tiny.root / f"srt/{name}.py").unlink()
        (tiny.root / f"srt/{name}.py").write_bytes(data)
    assert "was put back first" in deploy.rollback(near, to="base").recovered
    assert (tiny.root / "srt/a.py").read_bytes() == b"VALUE = 100\n"
    assert not (tiny.root / "srt/new").exists()
    assert deploy.status(near).state == "pristine"


@pytest.mark.parametrize("verb", ["snapshot", "fetch"])
def test_half_swapped_files_are_no_base_for_anything(tiny, near, monkeypatch, verb):
    """A snapshot between a crash and its recovery would mix two versions; the next step puts it back, and no more."""
    (tiny.root / "srt/speculative").mkdir()
    (tiny.root / "srt/speculative/dflash_worker.py").write_bytes(b"DFLASH = 1\n")
    push(near, tiny, {"srt/a.py": b"VALUE = 4\n"})
    original = (tiny.state / "deployments/d-0001/base/srt/a.py").read_bytes()
    with sabotaged(monkeypatch, "swap", "put", 2), pytest.raises(OverlayError):
        push(near, tiny, {"srt/b.py": b"VALUE = 9\n", "srt/new/c.py": b"C = 1\n"})
    ask = {"snapshot": lambda: snapshot_host(near, "x", ["srt/a.py"]), "fetch": lambda: deploy.fetch_files(near, ["a"])}
    with pytest.raises(ConflictError, match="a push of d-0002 was interrupted here") as caught:
        ask[verb]()
    assert "rollback --host here --to d-0001" in caught.value.next_step
    assert deploy.rollback(near, to="d-0001").undone == ()
    assert deploy.status(near).state == "applied"
    assert original == b"VALUE = 1\n"
    ask[verb]()


def test_status_of_an_overlay_with_a_pipe_in_it(tiny, near):
    """The file is named as drifted; status never fails for what it finds."""
    push(near, tiny)
    (tiny.root / "srt/a.py").unlink()
    os.mkfifo(tiny.root / "srt/a.py")
    found = deploy.status(near)
    assert found.state == "drifted"
    assert [(f.path, f.reason) for f in found.files if f.state == "foreign"] == [
        ("srt/a.py", "not a regular file since the push")
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_purge_that_would_stop_half_way_is_refused(tiny, near, tmp_path):
    """Another user's backups: nothing of them is removed, since half of them would be worse than all."""
    push(near, tiny)
    deploy.rollback(near)
    for folder in [tmp_path, *tmp_path.parents]:
        if folder != Path("/") and folder.stat().st_uid == os.geteuid() and str(folder).startswith("/tmp/"):
            folder.chmod(0o755)
    tiny.site.chmod(0o777)
    tiny.state.chmod(0o777)
    (tiny.state / "lock").chmod(0o666)
    wrapper = tmp_path / "as-nobody"
    wrapper.write_text(f'#!/bin/sh\nexec setpriv --reuid 65534 --regid 65534 --clear-groups {tiny.python} "$@"\n')
    wrapper.chmod(0o755)
    before = listing(tiny.state)
    with (
        open_transport(tiny.host(python=str(wrapper))) as transport,
        pytest.raises(OverlayError, match=r"no permission to write in .*deployments"),
    ):
        deploy.rollback(transport, purge=True)
    assert differences(before, listing(tiny.state)) == []
