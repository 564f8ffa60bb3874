# SPDX-License-Identifier: Apache-2.0
"""Several hosts in one command, each behind an sshd of its own: all of them change, or none does."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.support.commands import clean_environ
from tests.support.fleets import FULL, KILLED, RESULTS, SLOW, machines, save_bundle, write_workspace
from tests.support.installs import bundle_for
from tests.support.relay import Relay
from tests.support.servers import Server
from tests.support.sshd import SshdUnavailable, SshServer
from tests.support.trees import differences, listing

from ddtree_overlay.hosts import hostkeys
from ddtree_overlay.workspace import Workspace


CACHE = Path(__file__).parents[2] / ".cache"


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Four private sshds; in CI their absence is a failure, never a silent skip."""
    started = []
    try:
        started = [SshServer.start(tmp_path_factory.mktemp("sshd"), CACHE) for _ in range(4)]
        yield started
    except SshdUnavailable as e:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no sshd: {e}")
    finally:
        for server in started:
            server.stop()


@pytest.fixture
def three(tmp_path, servers, workspace):
    """The hosts a and b, and c on this machine, pristine, with one bundle that fits all of them."""
    fleet = machines(tmp_path / "hosts", [*servers[:2], None], dict.fromkeys("abc"))
    write_workspace(workspace, fleet)
    return fleet


def trees(fleet):
    return {name: listing(m.install.site) for name, m in fleet.items()}


def lines(text):
    """Each line as its columns, by the name of the host that it begins with."""
    return {line.split()[0]: line.split() for line in text.splitlines() if line.startswith("  ") and line.strip()}


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


def test_an_agent_that_is_killed_is_put_back_by_the_same_command(run, three):
    """`kill -9` of b's agent in the middle: its journal is undone at the next contact, which is the undo itself."""
    armed = three["b"].sabotage(f"pathlib.Path({{arm!r}}).unlink(); {KILLED}")
    done = run("push", "--group", "gpu", "--yes")
    assert done.code == 6, done.err
    assert not armed.exists()
    assert {n: m.changed() + m.left() for n, m in three.items()} == {n: [] for n in "abc"}
    assert "every host is as it was before" in done.out


def test_a_connection_that_is_lost_leaves_no_host_behind(three, workspace, tmp_path):
    """b is cut off for a second while its agent goes on and commits: it is reached again and rolled back.

    Nobody can know from here what became of a swap whose answer was lost (borgstore#189).
    """
    three["b"].sabotage(SLOW)
    with Relay(three["b"].server.port) as relay:
        cut_through(workspace, three["b"], relay)
        child = start(workspace, tmp_path, "push", "--group", "gpu", "--yes", "--json")
        wait_for(three["b"].busy)
    time.sleep(1)
    with Relay(three["b"].server.port, listen=relay.port):
        out, err = child.communicate(timeout=60)
    assert child.returncode == 6, err
    assert {h["host"]: h["fate"] for h in json.loads(out)["hosts"]} == dict.fromkeys("abc", "undone")
    assert "b: rolled back to base, every file verified" in err
    assert {n: m.changed() + m.left() for n, m in three.items()} == {n: [] for n in "abc"}


def test_a_host_that_does_not_come_back_is_named_with_what_to_do(run, three, workspace, tmp_path):
    """b is cut off for good, with the new overlay: exit 7, not known, and the advised commands work once it is back."""
    three["b"].sabotage(SLOW)
    relay = Relay(three["b"].server.port)
    cut_through(workspace, three["b"], relay)
    with relay:
        child = start(workspace, tmp_path, "push", "--group", "gpu", "--yes", "--timeout", "2")
        wait_for(three["b"].busy)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 7, err
    assert "gpu: FAILED, and not as before on b\n" in out
    assert lines(out)["b"][1:4] == ["NOT", "KNOWN", "?"]
    assert three["a"].changed() == three["c"].changed() == []
    assert "ddtree-overlay status --host b, then ddtree-overlay rollback --host b --to base" in err
    with Relay(three["b"].server.port, listen=relay.port):
        assert run("status", "--host", "b").out.startswith("b  applied")
        assert run("rollback", "--host", "b", "--to", "base", "--yes").code == 0
    assert three["b"].changed() == []


def test_two_pushes_to_the_same_hosts_never_leave_a_mixture(run, three, workspace, tmp_path):
    """They may both give up, but never half: all hosts have the overlay if one says so, and none has it otherwise."""
    both = [start(workspace, tmp_path, "push", "--group", "gpu", "--yes") for _ in range(2)]
    said = [child.communicate(timeout=60) for child in both]
    codes = [child.returncode for child in both]
    assert set(codes) <= {0, 4, 5, 6}, said
    found = run("status", "--group", "gpu", "--exit-code", "--json")
    assert (found.code, found.json["overlay_id"] is not None) == (0, 0 in codes), said
    assert {n: m.left() for n, m in three.items()} == {n: [] for n in "abc"}


def cut_through(workspace, machine, relay):
    """Let the configuration reach `machine` through `relay`."""
    pin = hostkeys.fingerprint(hostkeys.parse(machine.server.known_hosts.read_text(), "x")[0][0].blob)
    text = (workspace / "deploy.toml").read_text()
    through = f'port = {relay.port}\nhost_key_fingerprint = "{pin}"\n'
    (workspace / "deploy.toml").write_text(text.replace(f"port = {machine.server.port}\n", through))


def test_ctrl_c_ends_what_has_begun_and_puts_it_back(three, workspace, tmp_path):
    """SIGINT while b is being swapped: it is waited for, all three are as before, and the exit code is 130."""
    three["b"].sabotage(SLOW)
    child = start(workspace, tmp_path, "push", "--group", "gpu", "--yes")
    wait_for(three["b"].busy)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    assert "gpu: interrupted; every host is as it was before" in out
    assert "interrupted; waiting for what has begun" in err
    assert {n: m.changed() + m.left() for n, m in three.items()} == {n: [] for n in "abc"}


def test_a_host_that_cannot_be_put_back_is_named_with_the_way_back(run, three):
    """b fails and a's way back fails too: exit 7, c is as before, a's commands are printed (atomic-host-tests#155)."""
    three["a"].sabotage("if open(target).read() == 'VALUE = 6\\n': raise OSError(5, 'Input/output error')")
    three["b"].sabotage(FULL)
    done = run("push", "--group", "gpu", "--yes")
    assert done.code == 7, done.err
    assert "gpu: FAILED, and not as before on a\n" in done.out
    assert lines(done.out)["a"][1:4] == ["NOT", "PUT", "BACK"]
    assert "next: ddtree-overlay status --host a, then ddtree-overlay rollback --host a --to base" in done.err
    assert three["b"].changed() == three["c"].changed() == []
    assert run("status", "--group", "gpu", "--exit-code").out.startswith("gpu: SKEW")
    (three["a"].install.site / "sitecustomize.py").unlink()
    assert run("rollback", "--host", "a", "--to", "base", "--yes").code == 0
    assert three["a"].changed() == []


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


@pytest.fixture
def serving(three, workspace, tmp_path):
    """The hosts a, b and c, each with a running HTTP server that imports its tree, and the way to restart it."""
    running = {name: Server.create(m.install, tmp_path / f"server-{name}") for name, m in three.items()}
    text = (workspace / "deploy.toml").read_text()
    for name, server in running.items():
        server.start()
        keys = f'restart = ["{server.restart[0]}"]\nrestart_timeout = 5\n'
        health = f'[hosts.{name}.health]\nurl = "http://127.0.0.1:{server.port}"\ntimeout = 4\n'
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


def start(workspace, tmp_path, *words):
    """The command line as a process that goes on."""
    return subprocess.Popen(
        [sys.executable, "-m", "ddtree_overlay", *words],
        cwd=workspace,
        env=clean_environ(tmp_path / "home"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(path, seconds=20):
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.02)
