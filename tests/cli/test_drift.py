# SPDX-License-Identifier: Apache-2.0
"""Files that were edited by hand under an overlay: every refusal leads on, none of them in a circle."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from tests.support.statuses import host_status

from ddtree_overlay.cli.selecting import Target
from ddtree_overlay.cli.targets import deployed_bundle
from ddtree_overlay.errors import ConflictError
from ddtree_overlay.manifest import Bundle, Change
from ddtree_overlay.plans import Deployment, FileStatus, Status
from ddtree_overlay.workspace import StoredBundle


def rewrite(path: Path, data: bytes) -> None:
    """Replace a file as an editor does, leaving the package cache that shares it alone."""
    path.unlink()
    path.write_bytes(data)


def test_an_edit_by_hand_is_shown_and_can_be_taken_back(run, patched_root):
    """push and rollback name `diff`; its output, applied on the host, makes both work again."""
    root = ("--root", str(patched_root))
    assert run("push", *root, "--yes").code == 0
    edited, deleted = (patched_root / "srt" / name for name in ("server_args.py", "speculative/dflash_worker.py"))
    after = edited.read_bytes(), deleted.read_bytes()
    rewrite(edited, after[0] + b"# by hand\n")
    deleted.unlink()
    for verb in ("push", "rollback"):
        done = run(verb, *root, "--yes")
        assert done.code == 4, done.err
        assert f"next: ddtree-overlay diff --root {patched_root}" in done.err

    shown = run("diff", *root)
    assert shown.code == 0, shown.err
    assert "-# by hand\n" in shown.out
    assert "since d-0001 was pushed: srt/server_args.py, srt/speculative/dflash_worker.py" in shown.err
    assert f"patch -p2 -d {patched_root} < DIFF" in shown.err
    command = ["git", "apply", "-p2", "--unsafe-paths", f"--directory={patched_root}"]
    subprocess.run(command, input=shown.out, text=True, check=True, cwd=patched_root)
    assert (edited.read_bytes(), deleted.read_bytes()) == after
    assert "up to date" in run("push", *root, "--yes").out
    assert run("rollback", *root, "--yes").code == 0


def test_push_of_an_overlay_without_its_history_says_so(run, patched_root, site):
    """Nothing is written, and the operator hears that nothing on the host leads back."""
    root = ("--root", str(patched_root))
    assert run("push", *root, "--yes").code == 0
    shutil.rmtree(site / ".ddtree-overlay")
    done = run("push", *root, "--yes")
    assert (done.code, "up to date" in done.out) == (0, True)
    assert "no deployment recorded on the host put them there" in done.err


def test_a_base_that_was_edited_by_hand_is_told_by_name(run, site):
    """`snapshot` and `patch` warn, and `verify` has a finding: the overlay is tested on the published file."""
    edited = site / "sglang/srt/server_args.py"
    rewrite(edited, edited.read_bytes() + b"# by hand\n")
    for verb in ("snapshot", "patch"):
        done = run(verb, "--root", f"{site}/sglang", "--json")
        assert done.code == 0, done.err
        assert done.json["unlike_published"] == {"srt/server_args.py": "changed"}
        assert "1 file is not as SGLang 0.5.11 was published, and taken as the base: srt/server_args.py" in done.err
    findings = run("verify", "--root", f"{site}/sglang", "--offline", "--json").json["findings"]
    assert [f["path"] for f in findings if f["check"] == "base"] == ["srt/server_args.py"]


MINE = Bundle("0.5.11", (Change("srt/a.py", "x", "y", 1, 0),))
LIVE = Deployment("d-0003", "pending", "91c0", "3f2a", "0.5.11", "0.5.11", "ann@laptop", 0.0, 2, True, None, "")


@pytest.mark.parametrize(
    ("live", "what", "step"),
    [
        (
            host_status("pristine"),
            "no bundle fits",
            "ddtree-overlay snapshot --host ct200 && ddtree-overlay patch --host ct200",
        ),
        (host_status("unrecorded"), "no bundle fits", "ddtree-overlay rollback --host ct200"),
        (
            host_status("upgraded", deployment=LIVE, overlay_id=MINE.overlay_id),
            "no bundle fits",
            "ddtree-overlay snapshot --host ct200 && ddtree-overlay patch --host ct200 && ddtree-overlay push",
        ),
        (
            host_status(
                "drifted", deployment=LIVE, overlay_id="91c0", files=(FileStatus("srt/a.py", "foreign", "changed"),)
            ),
            "that of d-0003 was not built here",
            "then ddtree-overlay rollback --host ct200 --to base",
        ),
    ],
    ids=lambda value: value.state if isinstance(value, Status) else "",
)
def test_without_a_bundle_that_fits_each_state_has_its_own_way_out(live, what, step):
    """A base that nobody patched is snapshotted; one under an overlay is not, for that would be refused."""
    stored = [StoredBundle(MINE, Path("build/x"))]
    with pytest.raises(ConflictError, match=what) as caught:
        deployed_bundle(Target("ct200", "--host ct200"), stored, live, {"srt/a.py": "z"})
    assert step in caught.value.next_step
    assert "srt/a.py" in caught.value.why or live.state in {"unrecorded", "upgraded"}
