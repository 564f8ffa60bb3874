# SPDX-License-Identifier: Apache-2.0
"""`--try` and `scripts/check_release`: what would fit a release that is not supported."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tests.support.commands import clean_environ

from ddtree_overlay.releases import KNOWN
from ddtree_overlay.wheels import wheel_of


PROJECT = Path(__file__).parents[2]
METADATA = "sglang-0.5.11.dist-info/METADATA"


def call_it(site: Path, version: str) -> None:
    """Make the SGLang of a folder say that it is another version."""
    metadata = site / METADATA
    text = metadata.read_text("utf-8").replace("Version: 0.5.11\n", f"Version: {version}\n", 1)
    metadata.unlink()  # it is a hardlink
    metadata.write_text(text, "utf-8")


def everything(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_unknown_release_is_refused_by_name_and_tried_on_request(run, site: Path, workspace: Path):
    """Exit 1 without --try, 3 with it while something is open; no bundle is left that push could take."""
    call_it(site, "0.5.11.post4")
    root = ("--root", str(site / "sglang"))
    assert run("snapshot", *root).code == 0
    before = everything(workspace)

    for verb in ("patch", "verify"):
        done = run(verb, *root)
        assert done.code == 1
        assert "SGLang 0.5.11.post4 is not supported" in done.err or "was not patched yet" in done.err

    tried = run("verify", *root, "--try")
    assert tried.code == 0
    assert tried.out.splitlines()[0] == "SGLang 0.5.11.post4  is not supported; tried with the row of 0.5.11"
    assert tried.out.splitlines()[-1] == "fits: nothing left but its row in releases.py"

    worker = site / "sglang/srt/speculative/dflash_worker.py"
    text = worker.read_text("utf-8").replace("draft_next = self._greedy", "draft_ids = self._greedy")
    worker.unlink()
    worker.write_text(text, "utf-8")
    assert run("snapshot", *root).code == 0
    for verb in ("patch", "verify"):
        tried = run(verb, *root, "--try")
        assert tried.code == 3
        assert "differs srt/speculative/dflash_worker.py: 1 of " in tried.out
        assert "anchor is missing: `draft_next = " in tried.out
        assert "draft_ids = self._greedy_sample_from_vocab_parallel_head(" in tried.out
    after = everything(workspace)
    assert {p for p in after if not p.startswith("snapshots/")} == {p for p in before if not p.startswith("snapshots/")}
    pushed = run("push", *root, "--yes")
    assert pushed.code == 1
    assert "no bundle" in pushed.err


def test_report_is_one_json_object(run, site: Path):
    """For a nightly job: what fits, what not, and the findings."""
    call_it(site, "0.5.11.post4")
    root = ("--root", str(site / "sglang"))
    run("snapshot", *root)

    found = json.loads(run("verify", *root, "--try", "--json").out)

    assert (found["command"], found["ok"], found["exit_code"]) == ("verify", True, 0)
    assert (found["release"], found["based_on"], found["supported"], found["fits"]) == (
        "0.5.11.post4",
        "0.5.11",
        False,
        True,
    )
    assert [edit["path"] for edit in found["edits"]] == [edit.path for edit in KNOWN[0].edits]
    assert all(insertion["fits"] for edit in found["edits"] for insertion in edit["insertions"])
    assert {finding["check"] for finding in found["findings"]} >= {"hooks", "imports", "calls", "sites"}


def test_try_and_check_exclude_each_other(run):
    """One writes nothing because all is said to be there, the other because nothing may be."""
    done = run("patch", "--release", "0.5.11", "--check", "--try")

    assert done.code == 2
    assert "--check and --try exclude each other" in done.err


@pytest.fixture
def nightly(tmp_path: Path) -> Path:
    """A wheel as a nightly job builds one: 0.5.11 under a version of its own."""
    wheel = tmp_path / "sglang-0.5.12.dev7-cp311-cp311-manylinux_2_34_x86_64.whl"
    with zipfile.ZipFile(wheel_of("0.5.11", PROJECT / ".cache")) as old, zipfile.ZipFile(wheel, "w") as new:
        for item in old.infolist():
            data = old.read(item)
            if item.filename == METADATA:
                data = data.replace(b"Version: 0.5.11\n", b"Version: 0.5.12.dev7\n", 1)
            new.writestr(item, data)
    return wheel


def check_release(named: object, *words: str, home: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROJECT / "scripts/check_release"), str(named), *words]
    return subprocess.run(command, env=clean_environ(home), capture_output=True, text=True, timeout=240, check=False)


def test_wheel_of_a_nightly_build_is_checked(nightly: Path, tmp_path: Path):
    """End to end from the file, exit 0 when all fits, and nothing is left beside the wheel."""
    done = check_release(nightly, home=tmp_path)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("SGLang 0.5.12.dev7  is not supported; tried with the row of 0.5.11\n")
    assert json.loads(check_release(nightly, "--json", home=tmp_path).stdout)["fits"] is True
    assert list(tmp_path.iterdir()) == [nightly]


def test_wheel_that_does_not_fit_is_exit_3(nightly: Path, tmp_path: Path):
    """A release without a file that the overlay edits."""
    gone = b"sglang/srt/managers/schedule_batch.py"
    changed = tmp_path / nightly.name.replace("dev7", "dev8")
    with zipfile.ZipFile(nightly) as old, zipfile.ZipFile(changed, "w") as new:
        for item in old.infolist():
            data = old.read(item)
            if item.filename.endswith("RECORD"):
                data = b"".join(line for line in data.splitlines(keepends=True) if not line.startswith(gone))
            if item.filename != gone.decode():
                new.writestr(item, data)

    done = check_release(changed, home=tmp_path)

    assert done.returncode == 3
    assert "missing srt/managers/schedule_batch.py: SGLang has no such file" in done.stdout


@pytest.mark.parametrize(("named", "said"), [("nothing.whl", "cannot be read"), ("0.5.10", "has no DFlash")])
def test_what_cannot_be_had_is_exit_1(named: str, said: str, tmp_path: Path):
    """No traceback, and a way on."""
    done = check_release(named, home=tmp_path)

    assert done.returncode == 1
    assert said in done.stderr
    assert "next:" in done.stderr
    shutil.rmtree(tmp_path)
