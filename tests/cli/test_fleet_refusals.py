# SPDX-License-Identifier: Apache-2.0
"""One host that cannot be changed keeps all hosts of the command from being changed."""

from __future__ import annotations

import pytest
from tests.support.fleets import RESULTS, lines, trees
from tests.support.installs import bundle_for

from ddtree_overlay.workspace import Workspace


def test_an_unreachable_host_keeps_all_from_being_changed(run, three, workspace):
    """Nothing is written anywhere; status and rollback show the others all the same."""
    before = trees(three)
    dead = '[hosts.dead]\naddress = "127.0.0.1"\nport = 9\ntimeout = 5\n'
    text = (workspace / "deploy.toml").read_text()
    (workspace / "deploy.toml").write_text(dead + text.replace('["a", "b"', '["a", "dead", "b"'))

    done = run("push", "--group", "gpu", "--yes")
    assert done.code == 8, done.err
    assert "gpu: refused; every host is as it was before" in done.out
    assert lines(done.out)["dead"][1] == "refused"
    assert "ddtree-overlay push --host a --host b --host c" in done.err
    assert trees(three) == before
    done = run("status", "--group", "gpu", "--json")
    assert (done.code, done.json["settled"]) == (8, False)
    assert [h["status"] and h["status"]["state"] for h in done.json["hosts"]] == ["pristine", None, *["pristine"] * 2]


def test_a_locked_host_keeps_all_from_being_changed(run, three):
    """Exit 5 with the holder's name, before any host is swapped; no staged file stays behind anywhere."""
    before = trees(three)
    with three["b"].locked():
        done = run("push", "--group", "gpu", "--yes", "--json")
    assert done.code == 5, done.err
    assert {h["host"]: h["fate"] for h in done.json["hosts"]} == {"a": "untouched", "b": "refused", "c": "untouched"}
    assert "ann@desk" in done.err
    after = trees(three)
    assert (after["a"], after["c"], three["b"].changed()) == (before["a"], before["c"], [])


def test_drift_on_one_host_keeps_all_from_being_changed(run, three):
    """A file that is neither base nor overlay: exit 4 with its name, and no other host is touched (OBSong#85)."""
    (three["c"].install.root / "srt/b.py").write_bytes(b"VALUE = 2 \n")
    before = trees(three)
    done = run("push", "--group", "gpu", "--yes")
    assert done.code == 4, done.err
    assert "c: srt/b.py is not as expected" in done.err
    assert trees(three) == before


def test_a_host_without_an_exact_way_back_is_refused_in_a_fleet(run, three, workspace):
    """One that was reinstalled under its overlay could not be put back to that: it is asked to be brought in order."""
    second = bundle_for(three["a"].install.root, {**RESULTS, "srt/a.py": b"VALUE = 7\n"})
    assert run("push", "--group", "gpu", "--yes").code == 0
    (three["b"].install.root / "srt/b.py").write_bytes(b"VALUE = 2\n")
    Workspace(workspace).save_bundle(*second)
    before = trees(three)
    done = run("push", "--group", "gpu", "--yes")
    assert done.code == 4, done.err
    assert "b is partial" in done.err
    assert trees(three) == before
    done = run("status", "--group", "gpu", "--exit-code")
    assert done.code == 3
    assert run("push", "--host", "b", "--yes").code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("push", "--group", "gpux"), "did you mean 'gpu'?"),
        (("push", "--group", "gpu", "--root", "/tmp"), "--group and --root exclude each other"),
        (("push", "--group", "gpu", "--canary", "1"), "add --restart"),
        (("push", "--host", "a", "--canary", "1"), "--canary is for several hosts"),
        (("status", "--group", "gpu", "--parallel", "0"), "--parallel"),
        (("rollback", "--group", "gpu", "--purge", "--to", "d-0001"), "--purge goes back to the base"),
    ],
)
def test_what_nobody_means_is_refused(run, workspace, words, said):
    """Exit 2 and a way out, before any host is asked."""
    (workspace / "deploy.toml").write_text('[hosts.a]\n[hosts.b]\n[groups]\ngpu = ["a", "b"]\n')
    done = run(*words)
    assert done.code == 2, done.err
    assert said in done.err
