# SPDX-License-Identifier: Apache-2.0
"""Several hosts with servers that are restarted: the canary first, and all go back when one does not follow."""

from __future__ import annotations

import re

import pytest
from tests.support.fleets import trees
from tests.support.servers import Server
from tests.support.waiting import HANG

from ddtree_overlay.workspace import Workspace


@pytest.fixture
def serving(three, workspace, tmp_path):
    """The hosts a, b and c, each with a running HTTP server that imports its tree, and the way to restart it."""
    running = {name: Server.create(m.install, tmp_path / f"server-{name}") for name, m in three.items()}
    text = (workspace / "deploy.toml").read_text()
    for name, server in running.items():
        server.start()
        asked = server.health(4.0)
        keys = f'restart = ["{server.restart[0]}"]\nrestart_timeout = {HANG}\n'
        health = f'[hosts.{name}.health]\nurl = "{asked.url}"\ntimeout = {asked.timeout}\n'
        text = text.replace(f"[hosts.{name}]\n", f"[hosts.{name}]\n{keys}").replace("[groups]", f"{health}[groups]")
    (workspace / "deploy.toml").write_text(text)
    yield running
    for server in running.values():
        server.stop()


def tell_overlay(server):
    return server.info().get("speculative_ddtree_overlay_id")


def test_the_canary_is_proven_before_the_others_are_touched(run, serving, workspace):
    """a serves the overlay, tokens included, before b and c are swapped; then all of them are good."""
    bundle, files = serving["a"].overlay()
    Workspace(workspace).save_bundle(bundle, files)
    done = run("push", "--group", "gpu", "--canary", "1", "--restart", "--yes", "--json")
    assert done.code == 0, done.err
    said = done.err.splitlines()
    proven = next(i for i, line in enumerate(said) if line.startswith("a: live: "))
    assert proven < min(i for i, line in enumerate(said) if re.match(r"[bc]: swapped", line))
    assert {tell_overlay(s) for s in serving.values()} == {bundle.overlay_id}
    assert {(h["fate"], h["deployment"]["state"]) for h in done.json["hosts"]} == {("changed", "good")}
    restarts = {n: s.restarts() for n, s in serving.items()}
    done = run("push", "--group", "gpu", "--canary", "1", "--restart", "--yes", "--json")
    assert (done.code, {h["fate"] for h in done.json["hosts"]}) == (0, {"current"})
    assert {n: s.restarts() for n, s in serving.items()} == restarts

    done = run("rollback", "--group", "gpu", "--restart", "--yes")
    assert done.code == 0, done.err
    assert {tell_overlay(s) for s in serving.values()} == {None}


def test_a_canary_that_fails_leaves_the_others_alone(run, three, serving, workspace):
    """The new code ends a's server: a is put back and serves as before, b and c were neither swapped nor restarted."""
    Workspace(workspace).save_bundle(*serving["a"].overlay("crash"))
    before = {n: (s.restarts(), s.info()["pid"]) for n, s in serving.items() if n != "a"}
    done = run("push", "--group", "gpu", "--canary", "1", "--restart", "--yes", "--json")
    assert done.code == 6, done.err
    assert {h["host"]: h["fate"] for h in done.json["hosts"]} == {"a": "undone", "b": "untouched", "c": "untouched"}
    assert {n: (s.restarts(), s.info()["pid"]) for n, s in serving.items() if n != "a"} == before
    assert tell_overlay(serving["a"]) is None
    assert {n: m.left() for n, m in three.items()} == {n: [] for n in "abc"}
    assert [line for m in three.values() for line in m.changed() if "__pycache__" not in line] == []


def test_one_server_that_does_not_follow_takes_the_others_back(run, three, serving, workspace):
    """c's restart restarts nothing: all files go back, and a and b, which had the new code, are restarted again."""
    Workspace(workspace).save_bundle(*serving["a"].overlay())
    text = (workspace / "deploy.toml").read_text()
    (workspace / "deploy.toml").write_text(text.replace(str(serving["c"].restart[0]), "true"))
    done = run("push", "--group", "gpu", "--restart", "--yes", "--json")
    assert done.code == 6, done.err
    assert "c: the server does not run d-0001: still running the old code" in done.err
    assert {h["fate"] for h in done.json["hosts"]} == {"undone"}
    assert {tell_overlay(s) for s in serving.values()} == {None}
    assert [line for m in three.values() for line in m.changed() if "__pycache__" not in line] == []


def test_a_restart_is_refused_where_nobody_says_how(run, three, serving, workspace):
    """One host without health: refused by its name before any host is connected to."""
    text = (workspace / "deploy.toml").read_text()
    at = text.index("[hosts.b.health]")
    (workspace / "deploy.toml").write_text(text[:at] + text[text.index("[hosts.c.health]") :])
    before = trees(three)
    done = run("push", "--group", "gpu", "--canary", "1", "--restart", "--yes")
    assert done.code == 2, done.err
    assert "a restart of b could not be checked" in done.err
    assert trees(three) == before
    assert len(serving["a"].restarts()) == 1
