# SPDX-License-Identifier: Apache-2.0
"""`exec_prefix` with real programs in front of the interpreter, over SSH and without it."""

from __future__ import annotations

import os
import shlex
import shutil

import pytest
from tests.support.installs import bundle_for
from tests.support.sshd import SshServer
from tests.support.statuses import status_of
from tests.support.trees import differences, listing
from tests.support.waiting import HANG
from tests.support.wheels import CACHE

from ddtree_overlay import deploy
from ddtree_overlay.config import load_config
from ddtree_overlay.errors import OverlayError
from ddtree_overlay.hosts.transport import open_transport


@pytest.fixture(params=["ssh", "local"])
def reach(request, sshd, tiny):
    """How to make a host of `tiny`, over either transport."""

    def host(**over):
        fields = {"python": str(tiny.python), "timeout": HANG, **over}
        return sshd.host(**fields) if request.param == "ssh" else tiny.host(**fields)

    return host


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    "prefix",
    [
        ("env", "-u", "HOME", 'PLACE=it\'s a $HOME `x` "y" \\ z'),
        ("nice", "-n", "3"),
        ("setpriv", "--no-new-privs", "--"),
        ("sh", "-c", 'exec "$@"', "a name"),
    ],
    ids=lambda p: p[0],
)
def test_words_reach_the_prefix_unchanged(reach, tiny, prefix):
    """Blanks, quotes, `$` and backslashes of a prefix are words, not shell; the whole way works behind it."""
    before = listing(tiny.site)
    bundle, files = overlay_tiny(tiny)
    with open_transport(reach(exec_prefix=prefix)) as transport:
        plan = deploy.plan_push(transport, bundle, files)
        assert deploy.push(transport, plan, files, operator="x").id == "d-0001"
        assert deploy.rollback(transport, purge=True).purged
    assert differences(before, listing(tiny.site)) == []


def overlay_tiny(tiny):
    return bundle_for(tiny.root, {"srt/a.py": b"VALUE = 10\n", "srt/new/__init__.py": b""})


def test_the_environment_that_a_prefix_gives_reaches_the_interpreter(reach, tiny, tmp_path):
    """What `env NAME=VALUE` sets is there, letter for letter."""
    value = 'it\'s a $HOME `x` "y" \\ z'
    spy = script(tmp_path / "python", f'printf %s "$PLACE" > {tmp_path}/seen\nexec {tiny.python} "$@"')
    assert status_of(reach(python=spy, exec_prefix=("env", f"PLACE={value}"))).state == "pristine"
    assert (tmp_path / "seen").read_text() == value


@pytest.mark.usefixtures("namespaces")
def test_a_private_mount_namespace(reach, tiny, tmp_path):
    """`unshare -m` and a mount behind it: the interpreter sees, and changes, what only exists in there."""
    inside = tmp_path / "only-inside"
    inside.mkdir()
    venv = tiny.python.parents[1]
    mount = f'mount --bind {shlex.quote(str(venv))} {shlex.quote(str(inside))} && exec "$@"'
    prefix = ("unshare", "-m", "--", "sh", "-c", mount, "sh")
    found = status_of(reach(python=f"{inside}/bin/python", exec_prefix=prefix))
    assert found.root.startswith(str(inside))
    with pytest.raises(OverlayError, match="cannot be started"):
        status_of(reach(python=f"{inside}/bin/python"))


@pytest.mark.usefixtures("namespaces")
def test_another_root_folder(tiny, tmp_path):
    """`chroot DIR`, as into a container's file system: push and rollback happen in there and nowhere else."""
    root = tmp_path / "root"
    root.mkdir()
    venv = tiny.python.parents[1]
    mounts = f"mount --rbind / {root}\nmount -t tmpfs tmpfs {root}/srv\nmkdir {root}/srv/venv\n"
    mounts += f"mount --bind {venv} {root}/srv/venv"
    with SshServer.start(tmp_path / "sshd", CACHE, namespace=mounts) as server:
        host = server.host(python="/srv/venv/bin/python", exec_prefix=("chroot", str(root)))
        before = listing(tiny.site)
        bundle, files = overlay_tiny(tiny)
        with open_transport(host) as transport:
            plan = deploy.plan_push(transport, bundle, files)
            assert plan.root.startswith("/srv/venv/")
            deploy.push(transport, plan, files, operator="x")
            assert (tiny.root / "srt/a.py").read_bytes() == b"VALUE = 10\n"
            deploy.rollback(transport, purge=True)
        assert differences(before, listing(tiny.site)) == []


@pytest.mark.parametrize(
    ("prefix", "message", "step"),
    [
        (("/no/such/docker", "exec", "-i", "web"), "/no/such/docker exec -i web .* cannot be started", "exec_prefix"),
        (("sh", "-c", 'exec "$@" </dev/null', "sh"), "does not pass its standard input on", "docker exec -i"),
        (("sh", "-c", "echo Error: No such container: web >&2; exit 1"), "No such container: web", "exec_prefix"),
        (("sh", "-c", "exit 126"), "cannot be started", "exec_prefix"),
    ],
    ids=["missing", "no stdin", "refuses", "126"],
)
def test_a_prefix_that_does_not_work_says_so(reach, prefix, message, step):
    """The whole command line is named, with what it said, and the key to correct."""
    with pytest.raises(OverlayError, match=message) as caught:
        status_of(reach(exec_prefix=prefix))
    assert caught.value.exit_code == 1
    assert step in caught.value.next_step


def test_something_that_asks_on_the_terminal_fails_fast(reach, tmp_path):
    """No terminal is ever given, so a prompt cannot hang the deploy (fabric#2287, pyinfra#766, fabtools#332)."""
    asks = script(tmp_path / "ask", 'printf "Password: " >/dev/tty || exit 1; read -r x </dev/tty; exec "$@"')
    with pytest.raises(OverlayError, match="/dev/tty"):
        status_of(reach(exec_prefix=(asks,)))


@pytest.fixture
def sudo():
    """A real sudo; in CI its absence is a failure."""
    if os.geteuid() == 0 and shutil.which("sudo"):
        return
    reason = "real sudo needs root here, to become the user who must not use it, and sudo itself"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.mark.usefixtures("sudo")
def test_sudo_as_root_does_the_whole_way(reach, tiny):
    """`sudo -n` where it is allowed."""
    bundle, files = overlay_tiny(tiny)
    with open_transport(reach(exec_prefix=("sudo", "-n"))) as transport:
        deploy.push(transport, deploy.plan_push(transport, bundle, files), files, operator="x")
        assert deploy.status(transport).state == "applied"


@pytest.mark.usefixtures("sudo")
@pytest.mark.parametrize("words", [("sudo", "-n"), ("sudo",)], ids=" ".join)
def test_sudo_that_wants_a_password_fails_fast(reach, words):
    """Real sudo, asked by a user who may not: its own message and how to allow it, with or without -n (pyinfra#587)."""
    nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--")
    with pytest.raises(OverlayError, match=r"sudo on .* asks for a password or a terminal") as caught:
        status_of(reach(exec_prefix=(*nobody, *words)))
    assert "NOPASSWD" in caught.value.next_step
    assert "password is required" in caught.value.why or "terminal is required" in caught.value.why


@pytest.mark.parametrize(
    "said",
    [
        "sudo: a password is required",
        "sudo: sorry, you must have a tty to run sudo",
        "sudo: no tty present and no askpass program specified",
        "sudo: a terminal is required to read the password; either use the -S option to read from standard input",
    ],
)
def test_what_sudo_says_in_its_versions_is_understood(reach, tmp_path, said):
    """Old and new wordings, `requiretty` among them, lead to the same advice."""
    fake = script(tmp_path / "sudo", f"echo {shlex.quote(said)} >&2; exit 1")
    with pytest.raises(OverlayError, match="asks for a password or a terminal") as caught:
        status_of(reach(exec_prefix=(fake, "-n")))
    assert said in caught.value.why


def test_prefix_of_a_real_configuration(tmp_path, tiny):
    """A string in deploy.toml is split as a shell would, and the command line uses it."""
    file = tmp_path / "deploy.toml"
    file.write_text(
        f'[hosts.here]\ntransport = "local"\npython = "{tiny.python}"\nexec_prefix = "env \'A=b c\' nice -n 1"\n'
    )
    host = load_config(file).host("here")
    assert host.exec_prefix == ("env", "A=b c", "nice", "-n", "1")
    assert status_of(host).state == "pristine"
