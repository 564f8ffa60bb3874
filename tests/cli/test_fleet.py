# SPDX-License-Identifier: Apache-2.0
"""Several hosts in one command, each behind an sshd of its own: all of them change, or none does."""

from __future__ import annotations

import re

import pytest
from tests.support.fleets import FULL, RESULTS, lines, machines, save_bundle, trees, write_workspace
from tests.support.installs import bundle_for
from tests.support.trees import differences, listing

from ddtree_overlay.workspace import Workspace


def test_all_hosts_of_a_group_are_pushed_to_and_rolled_back(run, tmp_path, servers, workspace):
    """Four hosts, two at a time: one overlay id for all of them, and afterwards not a byte of it (gpustack#2691)."""
    fleet = machines(tmp_path / "hosts", servers, dict.fromkeys("abcd"))
    overlay = write_workspace(workspace, fleet)
    pristine = trees(fleet)

    dry = run("push", "--group", "gpu", "--dry-run")
    assert dry.code == 0, dry.err
    assert trees(fleet) == pristine
    done = run("push", "--group", "gpu", "--yes", "--parallel", "2")
    assert done.code == 0, done.err
    assert "gpu: pushed to 4 hosts" in done.out
    assert {n: c[1] for n, c in lines(done.out).items() if n in fleet} == dict.fromkeys("abcd", "pushed")
    for machine in fleet.values():
        assert {p: (machine.install.root / p).read_bytes() for p in RESULTS} == RESULTS
        assert machine.left() == []
    said = [line for line in done.err.splitlines() if line.startswith("b: ")]
    assert said == ["b: planned", "b: staged and checked", "b: swapped, d-0001 with 3 files verified"]

    done = run("status", "--group", "gpu", "--exit-code")
    assert (done.code, done.out.splitlines()[0]) == (0, f"gpu: overlay {overlay} (sglang 0.5.11) on 4 hosts")
    pushed = trees(fleet)
    done = run("push", "--group", "gpu", "--yes", "--json")
    assert (done.code, done.json["changed"]) == (0, False)
    assert {h["fate"] for h in done.json["hosts"]} == {"current"}
    assert trees(fleet) == pushed

    done = run("rollback", "--group", "gpu", "--purge", "--yes")
    assert done.code == 0, done.err
    assert "gpu: rolled back 4 hosts" in done.out
    assert {n: differences(pristine[n], t) for n, t in trees(fleet).items()} == {n: [] for n in "abcd"}
    assert run("rollback", "--group", "gpu", "--yes").code == 0


def test_a_host_that_fails_at_its_swap_takes_the_others_back(run, three):
    """The disk of b fills up after everything was staged: a and c are put back byte for byte (gpustack#2691)."""
    armed = three["b"].sabotage(FULL)
    done = run("push", "--group", "gpu", "--yes", "--json")
    assert done.code == 6, done.err
    hosts = {h["host"]: h for h in done.json["hosts"]}
    assert hosts["b"]["error"]["error"] == "RolledBackError"
    assert "No space left on device" in hosts["b"]["error"]["why"]
    assert {n: h["fate"] for n, h in hosts.items()} == dict.fromkeys("abc", "undone")
    for machine in three.values():
        assert machine.changed() == []
        assert machine.left() == []
    done = run("status", "--group", "gpu", "--exit-code")
    assert (done.code, done.out.splitlines()[0]) == (0, "gpu: no overlay (sglang 0.5.11) on 3 hosts")

    armed.unlink()
    assert run("push", "--host", "c", "--yes").code == 0
    armed.touch()
    done = run("push", "--group", "gpu", "--yes", "--json")
    assert (done.code, [h["fate"] for h in done.json["hosts"]]) == (6, ["undone", "undone", "current"])
    assert (three["a"].changed(), bool(three["c"].changed())) == ([], True), "a host that was up to date was put back"


def test_hosts_go_back_to_the_deployment_that_they_had(run, three, workspace):
    """Under a second overlay a failure brings the first one back, not the base (capistrano#1885)."""
    second = bundle_for(three["a"].install.root, {**RESULTS, "srt/a.py": b"VALUE = 7\n"})
    assert run("push", "--group", "gpu", "--yes").code == 0
    first = {n: listing(m.install.root) for n, m in three.items()}
    Workspace(workspace).save_bundle(*second)
    three["c"].sabotage(FULL, at="/sglang/srt/a.py")

    done = run("push", "--group", "gpu", "--yes", "--json")
    assert done.code == 6, done.err
    assert {n: differences(first[n], listing(m.install.root)) for n, m in three.items()} == {n: [] for n in "abc"}
    assert "a: rolled back to d-0001, every file verified" in done.err
    found = run("status", "--group", "gpu", "--json", "--exit-code")
    assert (found.code, found.json["skew"], found.json["overlay_id"]) == (0, False, done.json["hosts"][0]["before"])
    assert {h["status"]["deployment"]["id"] for h in found.json["hosts"]} == {"d-0001"}


def test_each_base_gets_the_bundle_that_fits_and_a_base_without_one_stops_all(run, tmp_path, servers, workspace):
    """Two builds of SGLang: refused until both have a bundle, then each gets its own, and status calls that SKEW."""
    other = {"__init__.py": b"", "srt/__init__.py": b"", "srt/a.py": b"VALUE = 8\n", "srt/b.py": b"VALUE = 9\n"}
    fleet = machines(tmp_path / "hosts", servers, {"a": None, "odd": other})
    write_workspace(workspace, fleet)
    before = trees(fleet)
    done = run("push", "--group", "gpu", "--yes")
    assert done.code == 4, done.err
    assert "ddtree-overlay snapshot --host odd" in done.err
    assert trees(fleet) == before

    overlay = save_bundle(workspace, fleet["odd"], {**RESULTS, "srt/b.py": b"VALUE = 10\n"})
    done = run("push", "--group", "gpu", "--yes", "--json")
    assert done.code == 0, done.err
    assert [h["after"] == overlay for h in done.json["hosts"]] == [False, True]
    done = run("status", "--group", "gpu", "--exit-code")
    assert done.code == 3
    assert done.out.startswith("gpu: SKEW: overlay ")


@pytest.mark.usefixtures("three")
def test_skew_names_who_has_what(run):
    """One host of three was pushed to alone: exit 3, both ids in the first line (gpustack#2691)."""
    assert run("push", "--host", "b", "--yes").code == 0
    done = run("status", "--group", "gpu", "--exit-code")
    assert done.code == 3
    assert re.match(
        r"gpu: SKEW: no overlay \(sglang 0.5.11\) on a, c; overlay \w{12} \(sglang 0.5.11\) on b\n", done.out
    )
    assert run("status", "--group", "gpu").code == 0
    done = run("push", "--group", "gpu", "--yes", "--json")
    assert [h["fate"] for h in done.json["hosts"]] == ["changed", "current", "changed"]


@pytest.mark.usefixtures("three")
def test_a_host_is_changed_once_however_often_it_is_named(run, workspace):
    """The same name twice is one host; two names of one package on one machine are refused before the lock is."""
    done = run("push", "--host", "b", "--group", "gpu", "--host", "b", "--yes", "--json")
    assert [h["host"] for h in done.json["hosts"]] == ["b", "a", "c"]
    assert done.code == 0
    text = (workspace / "deploy.toml").read_text()
    table = text[text.index("[hosts.a]") : text.index("[hosts.b]")]
    (workspace / "deploy.toml").write_text(table.replace("[hosts.a]", "[hosts.alias]") + text)
    done = run("rollback", "--host", "a", "--host", "alias", "--yes")
    assert done.code == 2, done.err
    assert "a and alias are the same SGLang on the same machine" in done.err
    assert run("status", "--host", "a", "--host", "b").out.startswith("a, b: overlay")


@pytest.mark.usefixtures("three")
def test_other_verbs_take_the_hosts_one_after_the_other(run):
    """One JSON object with an entry for each host, and the exit code of the worst (patch-package#143)."""
    done = run("history", "--group", "gpu", "--json")
    assert done.code == 0, done.err
    assert [(h["host"], h["deployments"]) for h in done.json["hosts"]] == [(n, []) for n in "abc"]
    done = run("patch", "--host", "a", "--host", "b", "--json")
    assert done.code == 1
    assert [h["error"] for h in done.json["hosts"]] == ["OverlayError"] * 2
    assert "ddtree-overlay snapshot --host b" in done.err
