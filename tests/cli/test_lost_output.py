# SPDX-License-Identifier: Apache-2.0
"""Output that is lost on a full disk or a closed stream: the exit code still says what happened to the host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.commands import clean_environ
from tests.support.trees import differences, listing


@pytest.fixture
def lost(workspace: Path, tmp_path: Path):
    """Run a command line in a shell whose redirections lose its output; gives its exit code and stderr."""
    if not os.path.exists("/dev/full"):
        assert not os.environ.get("CI"), "CI runs on Linux, which has /dev/full"
        pytest.skip("no /dev/full")

    def call(words: str, tail: str) -> tuple[int, str]:
        command = f"{sys.executable} -m ddtree_overlay {words} {tail}"
        options = {"cwd": workspace, "env": clean_environ(tmp_path / "home"), "timeout": 240}
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, **options)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stderr

    return call


def test_lost_output_of_a_verb_that_only_looks_is_a_failure(lost, site):
    """A full disk behind stdout is exit 1, not success; one behind stderr loses prose, and changes no code."""
    look = f"history --root {site}/sglang"
    for tail in ("> /dev/full", "--json > /dev/full"):
        code, said = lost(look, tail)
        assert code == 1
        assert "cannot write the output: No space left on device" in said
    for tail, code in (("2> /dev/full", 0), ("--json > /dev/full 2>&1", 1), ("> /dev/full 2>&-", 1)):
        assert lost(look, tail)[0] == code
    for tail in ("2> /dev/full", "--json > /dev/full 2>&1", "2>&-"):
        assert lost("status --host nope", tail)[0] == 2


@pytest.mark.parametrize("tail", ["--json > /dev/full", "--json > /dev/full 2>&1", ">&-", "2> /dev/full", "| true"])
def test_exit_code_after_a_change_speaks_of_the_change(lost, run, patched_root, tail):
    """Code 1 would say that nothing was changed; the host is, so the code stays 0 and the loss is a warning."""
    for verb, state in (("push", "applied"), ("rollback", "pristine")):
        code, said = lost(f"{verb} --root {patched_root} --yes", f"{tail}; exit ${{PIPESTATUS[0]}}")
        assert code == 0
        assert (f"the {verb} itself is done" in said) == (tail == "--json > /dev/full")
        assert run("status", "--root", str(patched_root), "--json").json["state"] == state


def test_push_whose_plan_nobody_can_read_changes_nothing(lost, patched_root, site):
    """Exit 1 when the plan itself cannot be printed: then it is not carried out."""
    before = listing(site)

    assert lost(f"push --root {patched_root} --yes", "> /dev/full")[0] == 1
    assert not differences(before, listing(site))
