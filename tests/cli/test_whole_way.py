# SPDX-License-Identifier: Apache-2.0
"""Snapshot to rollback through the command line, on the published wheel, over a real sshd and on a local folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.support.trees import differences, listing


@pytest.fixture
def over_ssh(sshd, host_python, workspace):
    """Make `ct200` the host behind the private sshd; gives back its site-packages."""
    (workspace / "deploy.toml").write_text(sshd.toml("ct200", str(host_python)))
    return next((host_python.parents[1] / "lib").glob("python*/site-packages"))


def outside_state(lines: list[str]) -> list[str]:
    """The differences without the overlay's own folder."""
    return [line for line in lines if ".ddtree-overlay" not in line]


def test_whole_way_over_ssh_leaves_no_byte_behind(run, over_ssh: Path, release_site: Path):
    """Every verb says what happened, and the tree ends as it began, in bytes, modes and names.

    The package cache that the install is hardlinked to never changes (uv#10579, pnpm#11782).
    """
    pristine, cache = listing(over_ssh), listing(release_site)
    on = ("--host", "ct200")

    done = run("snapshot", *on)
    assert done.code == 0, done.err
    assert re.match(rf"ct200  sglang 0\.5\.11  {over_ssh}/sglang \(wheel\)\n", done.out), done.out

    done = run("patch", *on, "--json")
    assert done.code == 0, done.err
    changes = {c["path"]: c["action"] for c in done.json["changes"]}
    assert changes["srt/server_args.py"] == "change"

    done = run("verify", *on)
    assert done.code == 0, done.out
    assert re.search(r"^verify: 0 errors", done.out, re.MULTILINE)
    assert re.search(
        r"^(info|warning) .*import neither patched nor pristine.*No module named", done.out, re.MULTILINE
    ), done.out

    done = run("diff", *on, "--exit-code")
    assert done.code == 3
    assert {line.split(" b/sglang/")[1] for line in done.out.splitlines() if line.startswith("diff --git")} == set(
        changes
    )
    assert "\x1b" not in done.out
    assert not differences(pristine, listing(over_ssh)), "a verb that only reads wrote something"

    dry = run("push", *on, "--dry-run")
    assert dry.code == 0, dry.err
    assert not differences(pristine, listing(over_ssh))
    done = run("push", *on, "--yes")
    assert done.code == 0, done.err
    assert "ct200: pushed as d-0001" in done.out
    plan = done.out[: done.out.index("ct200: pushed")]
    assert dry.out.startswith(plan), "the dry run shows another plan than the one that runs"
    assert len(outside_state(differences(pristine, listing(over_ssh)))) >= len(changes)
    assert listing(release_site) == cache

    done = run("status", *on, "--exit-code")
    assert done.code == 0, done.out
    assert done.out.startswith("ct200  applied")
    assert run("diff", *on, "--exit-code").code == 0

    pushed = listing(over_ssh)
    done = run("push", *on, "--yes", "--json")
    assert (done.code, done.json["changed"]) == (0, False)
    assert not differences(pushed, listing(over_ssh)), "an up-to-date push wrote something"

    done = run("rollback", *on, "--yes")
    assert done.code == 0, done.err
    assert not outside_state(differences(pristine, listing(over_ssh)))
    assert run("status", *on).out.startswith("ct200  pristine")
    assert "d-0001  rolled back" in run("history", *on).out

    assert run("rollback", *on, "--purge", "--yes").code == 0
    assert not differences(pristine, listing(over_ssh))
    assert listing(release_site) == cache
    done = run("rollback", *on, "--yes")
    assert (done.code, "nothing to roll back" in done.out) == (0, True)


def test_bundle_of_one_host_serves_another_with_the_same_base(run, over_ssh, site, workspace):
    """Digests decide, never names: a bundle built from a local folder is pushed to the host."""
    root = str(site / "sglang")
    for words in (("snapshot", "--root", root), ("patch", "--root", root), ("push", "--host", "ct200", "--yes")):
        done = run(*words)
        assert done.code == 0, done.err

    assert run("status", "--host", "ct200").out.startswith("ct200  applied")
    assert over_ssh
    assert not (workspace / "snapshots/ct200").exists()


def test_second_snapshot_transfers_nothing(run, site):
    """Unchanged files are not read again, a damaged copy is."""
    root = str(site / "sglang")
    first = run("snapshot", "--root", root, "--json").json
    again = run("snapshot", "--root", root, "--json").json

    assert first["facts"]["transferred"] == first["files"]
    assert again["facts"]["transferred"] == 0
    assert again["facts"]["unchanged"] == first["files"]


@pytest.mark.parametrize(
    "words",
    [
        ("snapshot",),
        ("patch",),
        ("verify",),
        ("diff",),
        ("push", "--dry-run"),
        ("push", "--yes"),
        ("status",),
        ("history",),
        ("doctor",),
        ("rollback", "--dry-run"),
        ("rollback", "--yes"),
    ],
    ids=" ".join,
)
def test_json_is_one_object_on_stdout(run, patched_root, words):
    """`--json` gives one object with its schema and the exit code, whatever is said on stderr (ufmt#259)."""
    if words[0] in {"rollback", "history"}:
        assert run("push", "--root", str(patched_root), "--yes").code == 0
    done = run(words[0], "--root", str(patched_root), *words[1:], "--json", "-vv")

    value = done.json
    assert value["schema"] == 1
    assert value["command"] == words[0]
    assert value["exit_code"] == done.code
    assert value["ok"] == (done.code == 0)


def test_unreachable_host_ends_with_8(run):
    """Nothing listens: the address is named, and so is a next step."""
    done = run("status", "--host", "ct200", "--timeout", "5")

    assert done.code == 8, done.err
    assert "127.0.0.1" in done.err
    assert "next: " in done.err


def test_unknown_host_key_ends_with_8(run, sshd, workspace, host_python, tmp_path):
    """A host that known_hosts does not know is refused before any credential is offered (CWE-295, st2#6386)."""
    (tmp_path / "empty").touch()
    text = sshd.toml("ct200", str(host_python)).replace(str(sshd.known_hosts), str(tmp_path / "empty"))
    (workspace / "deploy.toml").write_text(text)

    done = run("status", "--host", "ct200")

    assert done.code == 8, done.err
    assert "SHA256:" in done.err
    assert (tmp_path / "empty").read_text() == ""
    assert run("status", "--host", "ct200", "--accept-new").code == 0
    assert (tmp_path / "empty").read_text() == sshd.known_hosts.read_text()


@pytest.mark.parametrize("python", ["/nonexistent/python", "/bin/cat"])
def test_wrong_interpreter_is_refused(run, over_ssh, workspace, python):
    """Exit 1, naming the interpreter that was configured."""
    assert over_ssh
    done = run("snapshot", "--host", "ct200", "--python", python)

    assert done.code == 1, done.err
    assert python in done.err
    assert workspace


def test_host_without_sglang_is_refused(run, over_ssh):
    """Exit 1, naming the interpreter that does not find it."""
    (over_ssh / "sglang").rename(over_ssh / "other")
    done = run("snapshot", "--host", "ct200")

    assert done.code == 1, done.err
    assert "sglang" in done.err


def test_doctor_compares_two_hosts(run, over_ssh, workspace):
    """--against ends with 3 when the hosts differ and names what differs, and with 0 for equal ones."""
    text = (workspace / "deploy.toml").read_text()
    (workspace / "deploy.toml").write_text(text + text.replace("[hosts.ct200]", "[hosts.twin]"))

    assert run("doctor", "--host", "ct200", "--against", "twin").code == 0
    assert over_ssh
    (workspace / "deploy.toml").write_text(text + '[hosts.here]\ntransport = "local"\n')
    done = run("doctor", "--host", "ct200", "--against", "here")
    assert done.code in {1, 3}, done.err
