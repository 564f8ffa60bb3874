# SPDX-License-Identifier: Apache-2.0
"""apply.py of an export, under a real interpreter."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys

import pytest
from tests.support.trees import differences, listing


def test_apply_does_the_whole_way_and_leaves_no_byte_behind(apply, run, package, exported):
    """The same transaction as over SSH: the command line sees its deployment, and its rollback takes it away."""
    site = package.parent
    pristine, export_before = listing(site), listing(exported)
    dry = apply("push", "--dry-run")
    assert (dry.code, dry.json["changed"], dry.json["would_change"]) == (0, False, True), dry.err
    assert differences(pristine, listing(site)) == []

    done = apply("push", "--operator", "ann@desk")
    assert (done.code, done.json["schema"], done.json["changed"]) == (0, 1, True), done.err
    assert (done.json["deployment"]["id"], done.json["deployment"]["operator"]) == ("d-0001", "ann@desk")
    assert "pushed as d-0001" in done.err
    seen = run("status", "--root", str(package), "--json").json
    assert (seen["state"], seen["overlay_id"]) == ("applied", done.json["overlay_id"])
    assert apply("status").json["state"] == "applied"

    pushed = listing(site)
    again = apply("push")
    assert (again.code, again.json["changed"]) == (0, False)
    assert differences(pushed, listing(site)) == []
    assert [d["operator"] for d in apply("history").json["deployments"]] == ["ann@desk"]

    back = apply("rollback", "--undo", "d-0001")
    assert (back.code, back.json["changed"], back.json["overlay_id"]) == (0, True, None), back.err
    assert apply("rollback").json["changed"] is False
    assert apply("rollback", "--purge").code == 0
    assert differences(pristine, listing(site)) == []
    assert differences(export_before, listing(exported)) == []


def test_a_drifted_file_is_a_conflict(apply, package):
    """Exit 4, the file named, nothing written; the next step can be typed as it is."""
    target = package / "srt/server_args.py"
    text = target.read_bytes() + b"# mine\n"
    target.unlink()
    target.write_bytes(text)
    before = listing(package.parent)
    done = apply("push")
    assert (done.code, done.json["ok"], done.json["error"], done.json["changed"]) == (4, False, "ConflictError", False)
    assert "srt/server_args.py is not as expected" in done.err
    assert differences(before, listing(package.parent)) == []


def test_another_live_deployment_is_not_undone(apply, exported, package):
    """Whoever undoes his own push does not undo the next one's (exit 4), and is told how to look."""
    assert apply("push").code == 0
    done = apply("rollback", "--undo", "d-0007")
    assert (done.code, done.json["what"]) == (4, "d-0001 is live, not d-0007")
    assert done.json["next"] == f"{sys.executable} {exported}/apply.py history --root {package}"
    assert apply("status").json["state"] == "applied"


def test_a_held_lock_ends_with_5(apply, package):
    """The kernel's lock is the one that a push over SSH holds."""
    state = package.parent / ".ddtree-overlay"
    state.mkdir()
    with (state / "lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        json.dump({"pid": 4711, "operator": "bob@desk", "doing": "push", "since": 0}, stream)
        stream.flush()
        done = apply("push", "--lock-wait", "0.2")
    assert (done.code, done.json["error"]) == (5, "LockedError")
    assert "bob@desk" in done.err


@pytest.mark.parametrize(
    ("name", "how"), [("layer/srt/server_args.py", "gone"), ("ddtree_agent/swap.py", "cut"), ("manifest.json", "cut")]
)
def test_a_damaged_export_does_not_run(apply, exported, package, name, how):
    """A copy that was cut short is refused before any of it runs: exit 1, and an answer in JSON all the same."""
    file = exported / name
    data = file.read_bytes()
    file.unlink()
    if how == "cut":
        file.write_bytes(data[: len(data) // 2])
    before = listing(package.parent)
    done = apply("push")
    assert (done.code, done.json["ok"], done.json["changed"]) == (1, False, False)
    assert "this export is damaged" in done.err
    assert (done.json["command"], done.json["error"]) == ("push", "OverlayError")
    assert differences(before, listing(package.parent)) == []


def test_nothing_beside_the_script_or_in_the_current_folder_is_imported(apply, exported, tmp_path):
    """A module of that name there is neither the standard library's nor the server's SGLang (uv#2500)."""
    for folder in (exported, tmp_path / "cwd"):
        folder.mkdir(exist_ok=True)
        for name in ("json.py", "argparse.py", "sglang.py"):
            (folder / name).write_text("raise SystemExit('imported from the wrong place')\n")
    for python in ((sys.executable,), (sys.executable, "-I"), (sys.executable, "-B", "-S")):
        done = apply("status", python=python, cwd=tmp_path / "cwd")
        assert done.code == 0, done.err


def test_without_sglang_the_interpreter_is_named(exported, tmp_path):
    """Exit 1; the advice is for this machine and not about deploy.toml."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", exported / "apply.py", "push"],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )
    assert done.returncode == 1
    step = json.loads(done.stdout)["next"]
    assert step.startswith("run apply.py with the interpreter that starts the server")
    assert "deploy.toml" not in step
    assert tmp_path
