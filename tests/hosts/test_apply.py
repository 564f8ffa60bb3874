# SPDX-License-Identifier: Apache-2.0
"""apply.py of an export, with a real server that it restarts and waits for."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest
from tests.support.commands import Ran
from tests.support.installs import bundle_for
from tests.support.servers import Server
from tests.support.trees import differences, listing
from tests.support.waiting import HANG

from ddtree_overlay import deploy, export
from ddtree_overlay.hosts.transport import open_transport


@pytest.fixture
def server(tiny, tmp_path):
    """A server of `tiny`, running without an overlay."""
    server = Server.create(tiny, tmp_path / "server")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def exported(server, tmp_path):
    """Write an export of an overlay that makes the server behave as `mode`; gives its apply.py."""

    def make(mode):
        for path, data in export.export_files(*server.overlay(mode)).items():
            target = tmp_path / f"export-{mode}" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        return tmp_path / f"export-{mode}" / "apply.py"

    return make


def command(server, script, *words):
    return [server.install.python, script, *words]


def restart(server, seconds=HANG):
    health = server.health(seconds)
    return ("--restart", "--command", server.restart[0], "--url", health.url, "--timeout", str(health.timeout))


def run(*words):
    done = subprocess.run(command(*words), cwd="/", capture_output=True, text=True, timeout=4 * HANG, check=False)
    return Ran(done.returncode, done.stdout, done.stderr)


def code_of(tree):
    """A listing without what the server itself compiles and without the state folder."""
    return {p: what for p, what in tree.items() if "__pycache__" not in p and ".ddtree-overlay" not in p}


def test_push_restarts_and_proves(server, exported):
    """The server reports the overlay afterwards, the deployment is good, and a second run restarts nothing."""
    script = exported("well")
    done = run(server, script, "push", *restart(server))
    assert (done.code, done.json["changed"], done.json["proof"]["verdict"]) == (0, True, "live"), done.err
    assert done.json["deployment"]["state"] == "good"
    assert server.info()["speculative_ddtree_overlay_id"] == done.json["overlay_id"]
    assert "  restarting the server for d-0001" in done.err
    again = run(server, script, "push", *restart(server))
    assert (again.code, again.json["changed"], len(server.restarts())) == (0, False, 2), again.err
    back = run(server, script, "rollback", *restart(server))
    assert (back.code, back.json["proof"]["ok"]) == (0, True), back.err
    assert "speculative_ddtree_overlay_id" not in server.info()


def test_a_dry_run_sees_whether_a_restart_could_be_run_and_checked(server, exported):
    """What the server runs now is said; a restart command that is not there is refused before anything is changed."""
    script, before = exported("well"), listing(server.install.site)
    done = run(server, script, "push", "--dry-run", *restart(server))
    assert (done.code, done.json["changed"], done.json["would_change"]) == (0, False, True), done.err
    assert "no overlay" in done.json["server"]
    words = [w if w != server.restart[0] else "/no/such/program" for w in restart(server)]
    done = run(server, script, "push", "--dry-run", *words)
    assert (done.code, done.json["changed"]) == (1, False)
    assert "there is no program '/no/such/program'" in done.err
    assert "next: correct --command" in done.err
    assert differences(before, listing(server.install.site)) == []


def test_a_server_that_does_not_come_up_is_put_back(server, exported):
    """Exit 6, every byte as before, and the old state serves; the advice is for this machine."""
    before = listing(server.install.site)
    done = run(server, exported("crash"), "push", *restart(server, seconds=2))
    assert (done.code, done.json["error"], done.json["changed"]) == (6, "RolledBackError", False), done.err
    assert differences(code_of(before), code_of(listing(server.install.site))) == []
    assert "speculative_ddtree_overlay_id" not in server.info()
    assert "deploy.toml" not in done.err
    assert "hush-hush" not in done.out + done.err


def test_nobody_has_to_wait_for_it(server, exported):
    """With its streams closed and a hangup and an interrupt sent, as when an SSH connection is lost, it goes on."""
    script = exported("well")
    words = command(server, script, "push", *restart(server))
    child = subprocess.Popen(words, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout
    assert child.stderr
    first = child.stderr.readline()
    assert first.startswith(b"  "), first
    child.stdout.close()
    child.stderr.close()
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        os.kill(child.pid, number)
    assert child.wait(timeout=HANG) == 0
    assert run(server, script, "status").json["deployment"]["state"] == "good"


def test_confirm_takes_the_operators_word(server, exported):
    """For a server that is restarted by other means; one that says something else is not confirmed."""
    script, url = exported("well"), server.url
    pushed = run(server, script, "push").json
    assert pushed["deployment"]["state"] == "pending"
    done = run(server, script, "confirm", "--url", url)
    assert (done.code, done.json["changed"]) == (1, False)
    assert "the live server runs no overlay" in done.err
    server.start()
    server.runs(pushed["overlay_id"])
    done = run(server, script, "confirm", "--url", url, "--note", "seen by ann")
    assert (done.code, done.json["changed"]) == (0, True), done.err
    assert run(server, script, "history").json["deployments"][0]["state"] == "good"
    assert run(server, script, "confirm").json["changed"] is False


@pytest.mark.parametrize(
    "words",
    [
        ("push", "--restart"),
        ("push", "--restart", "--url", "http://x"),
        ("push", "--restart", "--unit", "x", "--url", "127.0.0.1:30000"),
        ("push", "--restart", "--url", "http://x", "--command", "it's"),
        ("push", "--lock-wait", "nan"),
        ("pusj",),
        (),
    ],
    ids=" ".join,
)
def test_bad_arguments_end_with_2(server, exported, words):
    """And with what to look at."""
    done = run(server, exported("well"), *words)
    assert (done.code, done.out) == (2, "")
    assert "next: see apply.py" in done.err


@pytest.mark.usefixtures("namespaces")
def test_in_a_container_the_way_to_keep_the_overlay_is_named(tiny, tmp_path):
    """A package in the container's own layer, a real overlayfs: push and status say what is lost, and what keeps it."""
    (tmp_path / "layer").mkdir()
    layer = f"mount -t tmpfs tmpfs {tmp_path}/layer && cd {tmp_path}/layer && mkdir upper work"
    layer += f" && mount -t overlay overlay -o lowerdir={tiny.site},upperdir=upper,workdir=work {tiny.site}"
    mark = "mount -t tmpfs tmpfs /run && touch /run/.containerenv"
    prefix = ("unshare", "-m", "--propagation", "private", "sh", "-c", f'{layer} && {mark} && cd / && exec "$@"', "sh")
    with open_transport(tiny.host(exec_prefix=prefix)) as transport:
        plan = deploy.plan_push(transport, *bundle_for(tiny.root, {"srt/a.py": b"VALUE = 5\n"}))
        found = deploy.status(transport)
    for said in (plan.warnings, found.warnings):
        assert len([w for w in said if w.startswith(f"{tiny.root} lies in the throw-away layer of a ")]) == 1
        assert "ddtree-overlay export --host here --format dockerfile --out FOLDER" in " ".join(said)
