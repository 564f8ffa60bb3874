# SPDX-License-Identifier: Apache-2.0
"""The SSH transport against a real sshd: what is said, and that nothing hangs; `test_ssh_trust` has the keys."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading

import pytest
from tests.support.installs import overlay_for
from tests.support.ports import free_port
from tests.support.sshd import SshServer, new_lines
from tests.support.statuses import status_of
from tests.support.trees import differences, listing
from tests.support.waiting import AGES, HANG, no_hang, until
from tests.support.wheels import CACHE

from ddtree_overlay import deploy
from ddtree_overlay.errors import ConfigError, ConnectionFailedError, HostKeyError, OverlayError
from ddtree_overlay.hosts.transport import open_transport


def test_the_whole_way_over_ssh(sshd, sglang):
    """Push and rollback through sshd leave exactly the tree that was there before."""
    before = listing(sglang.site)
    bundle, files = overlay_for(sglang.root)
    with open_transport(sshd.host(python=str(sglang.python))) as transport:
        plan = deploy.plan_push(transport, bundle, files)
        assert deploy.push(transport, plan, files, operator="x").id == "d-0001"
        assert deploy.status(transport).state == "applied"
        assert deploy.rollback(transport, purge=True).purged
        assert deploy.status(transport).state == "pristine"
    assert differences(before, listing(sglang.site)) == []


def test_unreachable_host(sshd):
    """A closed port: exit code 8 with address and port."""
    port = free_port()
    with pytest.raises(ConnectionFailedError, match=f"port {port}: Connection refused") as caught:
        status_of(sshd.host(port=port))
    assert caught.value.exit_code == 8


def test_a_mute_server_does_not_hang_us(sshd):
    """Something that accepts and never speaks is given up after the timeout (RMS#791)."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        with no_hang(), pytest.raises(ConnectionFailedError, match="no SSH connection"):
            status_of(sshd.host(port=sock.getsockname()[1], timeout=1.0))


@pytest.mark.parametrize(
    ("python", "message"),
    [
        ("/no/such/python", "cannot be started"),
        ("/etc/passwd", "cannot be started"),
        ("/bin/true", "does not behave like a Python"),
        ("/bin/cat", "does not behave like a Python"),
    ],
)
def test_wrong_interpreter(sshd, python, message):
    """Each way of not being a Python is told apart, and the key to change is named."""
    with pytest.raises(OverlayError, match=message) as caught:
        status_of(sshd.host(python=python))
    assert caught.value.exit_code == 1
    assert "`python` in deploy.toml" in caught.value.next_step


def test_interpreters_with_blanks_and_quotes_in_their_path(sshd, tiny, tmp_path):
    """The login shell must pass the path on unchanged."""
    odd = tmp_path / "it's a $HOME" / "python"
    odd.parent.mkdir()
    odd.write_text(f'#!/bin/sh\nexec {tiny.python} "$@"\n')
    odd.chmod(0o755)
    assert status_of(sshd.host(python=str(odd))).state == "pristine"


def test_noisy_start_up_files_do_not_matter(tmp_path, tiny, sshd):
    """A .bashrc that prints on both streams is heard, warned about and ignored (paramiko#395, pyinfra#727)."""
    del sshd  # only to be skipped with it
    noise = 'echo "Welcome to ct200"; echo "stderr too" >&2\n'
    with (
        SshServer.start(tmp_path / "noisy", CACHE, bashrc=noise) as server,
        open_transport(server.host(python=str(tiny.python))) as transport,
    ):
        assert deploy.status(transport).state == "pristine"
        assert any("Welcome to ct200" in w for w in transport.warnings)


def test_modules_in_the_home_folder_are_not_imported(sshd, tiny):
    """`-c` puts the current folder first on the path, and that is the login's home: its json.py is not ours."""
    shadows = [sshd.home / f"{name}.py" for name in ("json", "re", "enum", "types", "hashlib", "importlib")]
    try:
        for shadow in shadows:
            shadow.write_text("raise SystemExit('shadowed')\n")
        assert status_of(sshd.host(python=str(tiny.python))).state == "pristine"
    finally:
        for shadow in shadows:
            shadow.unlink()


@pytest.mark.parametrize("way", ["ssh", "local"])
def test_a_process_that_keeps_the_streams_open_is_not_waited_for(sshd, tiny, tmp_path, way):
    """`sleep 600 &` in a start-up file inherits stdout; the answer counts as soon as it is whole."""
    leaving = tmp_path / "python"
    leaving.write_text(f'#!/bin/sh\nsleep {AGES} &\necho $! > {tmp_path}/pid\nexec {tiny.python} "$@"\n')
    leaving.chmod(0o755)
    over = {"python": str(leaving), "timeout": 2 * HANG}
    try:
        with no_hang():
            assert status_of(sshd.host(**over) if way == "ssh" else tiny.host(**over)).state == "pristine"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_a_lot_of_output_on_both_streams_does_not_deadlock(sshd, tiny, tmp_path):
    """5 MB on each stream before the agent starts are drained (paramiko#1778, #448)."""
    loud = tmp_path / "python"
    flood = "head -c 5000000 /dev/zero | tr '\\0' x"
    loud.write_text(f'#!/bin/sh\n{flood} >&2\n{flood}\nexec {tiny.python} "$@"\n')
    loud.chmod(0o755)
    assert status_of(sshd.host(python=str(loud))).state == "pristine"


def test_a_stalled_agent_is_given_up(sshd, tmp_path):
    """No byte for `timeout` seconds ends the call (paramiko#1815: recv_exit_status ignores timeouts)."""
    slow = tmp_path / "python"
    slow.write_text(f"#!/bin/sh\nexec sleep {AGES}\n")
    slow.chmod(0o755)
    with (
        no_hang(),
        pytest.raises(ConnectionFailedError, match="no sign of life for 1 s"),
        open_transport(sshd.host(python=str(slow))) as transport,
    ):
        # The connection itself may take longer than that.
        transport.call("status", {}, timeout=1.0)


def test_a_killed_agent_is_a_lost_connection(sshd, tmp_path):
    """A process ended by a signal has exit status -1 in paramiko; that is never taken for success."""
    dying = tmp_path / "python"
    dying.write_text("#!/bin/sh\nkill -9 $$\n")
    dying.chmod(0o755)
    with pytest.raises(ConnectionFailedError, match="terminated by a signal or the connection was lost"):
        status_of(sshd.host(python=str(dying)))


def test_a_connection_that_drops_is_reported(tmp_path, tiny, sshd):
    """The session is killed while the agent runs: a clear error, and no hang."""
    marker = tmp_path / "started"
    slow = tmp_path / "python"
    slow.write_text(f"#!/bin/sh\necho $PPID > {marker}.tmp; mv {marker}.tmp {marker}; exec sleep {AGES}\n")
    slow.chmod(0o755)

    def drop():
        until(marker.exists)
        os.kill(int(marker.read_text()), signal.SIGKILL)

    thread = threading.Thread(target=drop)
    thread.start()
    with pytest.raises(ConnectionFailedError):
        status_of(sshd.host(python=str(slow)))
    thread.join()
    assert status_of(sshd.host(python=str(tiny.python))).state == "pristine"


def test_ssh_configuration_is_resolved_by_ssh_itself(sshd, tiny, tmp_path):
    """Include, Host patterns, IdentityFile and known hosts of the user's configuration count (fabric#2215)."""
    inner = tmp_path / "inner"
    inner.write_text(
        f"Host gpu-*\n  HostName 127.0.0.1\n  Port {sshd.port}\n  User {sshd.user}\n"
        f"  IdentityFile {sshd.identity}\n  IdentitiesOnly yes\n  UserKnownHostsFile {sshd.known_hosts}\n"
    )
    outer = tmp_path / "config"
    outer.write_text(f"Include {inner}\n")
    plain = {"address": "gpu-7", "port": None, "user": None, "identity_file": None, "known_hosts": None}
    host = sshd.host(python=str(tiny.python), ssh_config=str(outer), **plain)
    assert status_of(host).state == "pristine"


def test_jump_hosts_are_used_and_verified(sshd, tiny, tmp_path):
    """ProxyJump goes through the first sshd to the second; each proves its key (sshtunnel#280)."""
    with SshServer.start(tmp_path / "inner", CACHE) as inner:
        known = tmp_path / "known_hosts"
        known.write_text(sshd.known_hosts.read_text() + inner.known_hosts.read_text())
        config = tmp_path / "config"
        config.write_text(
            f"Host jump\n  HostName 127.0.0.1\n  Port {sshd.port}\n  User {sshd.user}\n  IdentityFile {sshd.identity}\n"
            f"Host inside\n  HostName 127.0.0.1\n  Port {inner.port}\n  User {inner.user}\n"
            f"  IdentityFile {inner.identity}\n  ProxyJump jump\n"
        )
        plain = {"address": "inside", "port": None, "user": None, "identity_file": None}
        host = inner.host(python=str(tiny.python), ssh_config=str(config), known_hosts=str(known), **plain)
        before = sshd.log()
        assert status_of(host).state == "pristine"
        assert "Accepted publickey" in new_lines(sshd, before)
        known.write_text(inner.known_hosts.read_text())
        with pytest.raises(HostKeyError, match=f"through jump.*port {sshd.port}"):
            status_of(host)


def test_proxy_command_is_refused_by_name(sshd, tmp_path):
    """What is not supported is said, not ignored."""
    config = tmp_path / "config"
    config.write_text("Host *\n  ProxyCommand nc %h %p\n")
    with pytest.raises(ConfigError, match="ProxyCommand is not supported"):
        status_of(sshd.host(ssh_config=str(config)))


def test_a_request_that_is_cut_short_changes_nothing(tiny):
    """The agent starts only with the last byte of its request; a truncated one is no request."""
    from ddtree_overlay.hosts import protocol

    before = listing(tiny.site)
    request = protocol.encode(
        "rollback", {"to": None, "purge": True, "expect": [], "operator": "", "lock_wait": 0}, b""
    )
    for size in (0, 5, 1000, len(request) // 2, len(request) - 3):
        words = [tiny.python, "-c", protocol.BOOTSTRAP, "mark"]
        done = subprocess.run(words, input=request[:size], capture_output=True, check=False, timeout=HANG)
        assert done.stdout == b""
    assert differences(before, listing(tiny.site)) == []


def test_a_snapshot_that_arrives_truncated_is_no_answer(sshd, sglang, tmp_path):
    """An answer cut in the middle of its payload is a lost connection, never a shorter snapshot (paramiko put/get)."""
    from ddtree_overlay import snapshots

    cut = tmp_path / "python"
    cut.write_text(f'#!/bin/sh\n{sglang.python} "$@" | head -c 400000\n')
    cut.chmod(0o755)
    with (
        open_transport(sshd.host(python=str(cut))) as transport,
        pytest.raises(ConnectionFailedError, match="cut short"),
    ):
        snapshots.snapshot_host(transport, "x", ["srt/server_args.py"])
