# SPDX-License-Identifier: Apache-2.0
"""Networks that stall or break, with a real sshd behind a relay: every operation ends, and none does half of it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.support.agents import sabotaged, standing_still
from tests.support.installs import overlay_for
from tests.support.relay import Relay
from tests.support.sshd import SshServer, sessions_of
from tests.support.trees import differences, listing
from tests.support.waiting import HANG, no_hang, settled, until
from tests.support.wheels import CACHE

from ddtree_overlay import deploy
from ddtree_overlay.errors import ConnectionFailedError
from ddtree_overlay.hosts import connect, hostkeys
from ddtree_overlay.hosts.transport import open_transport


#: Meant to run out: nothing that has to succeed is done within it.
TIMEOUT = 1.0


@pytest.fixture(scope="module")
def pin(sshd):
    return hostkeys.fingerprint(hostkeys.parse(sshd.known_hosts.read_text(), "x")[0][0].blob)


@pytest.fixture(scope="module")
def traffic(sshd, pin, tmp_path_factory):
    """How many bytes an undisturbed `status` sends and gets."""
    from tests.support.installs import new_venv, tiny_package

    python, site = new_venv(tmp_path_factory.mktemp("traffic") / "venv")
    tiny_package(site, "0.5.11")
    with Relay(sshd.port) as relay, open_transport(through(sshd, relay, pin, python)) as transport:
        assert deploy.status(transport).state == "pristine"
        return python, dict(relay.passed)


def through(sshd, relay, pin, python, **over):
    return sshd.host(python=str(python), port=relay.port, host_key_fingerprint=pin, **over)


def lose_patience(transport, seconds):
    """With a connection that was made in peace, and is to be found dead in `seconds`."""
    transport._host = dataclasses.replace(transport.host, timeout=seconds)


@pytest.mark.parametrize(
    ("way", "share"),
    [
        *(("up", share) for share in (0.0, 0.005, 0.02, 0.1, 0.5, 0.99)),
        *(("down", share) for share in (0.005, 0.2, 0.5, 0.7, 0.8, 0.9)),
    ],
)
def test_a_stalled_network_ends_every_operation(sshd, pin, traffic, way, share):
    """Greeting, key exchange, login, start, request, answer: whichever stalls, the end comes in time.

    paramiko waits without end when a session is asked for a command (paramiko#1380, #515; borgbackup/borgstore#189).
    """
    python, passed = traffic
    with (
        no_hang(),
        Relay(sshd.port, **{way: int(passed[way] * share)}) as relay,
        pytest.raises(ConnectionFailedError, match=r"no sign of life|no SSH connection|no answer"),
        open_transport(through(sshd, relay, pin, python, timeout=TIMEOUT)) as transport,
    ):
        deploy.status(transport)


def test_a_relay_that_holds_bytes_back_does_not_hang_up():
    """Whichever of its two directions notices the stall first; a hang-up is another kind of failure."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        for _ in range(200):
            with (
                Relay(server.getsockname()[1], up=0) as relay,
                socket.create_connection(("127.0.0.1", relay.port), timeout=0.01) as client,
            ):
                client.sendall(b"x")
                peer, _ = server.accept()
                with peer, contextlib.suppress(TimeoutError):
                    peer.sendall(b"greeting")
                    # It may be faster than the byte that stalls.
                    while received := client.recv(100):
                        assert received == b"greeting"
                    pytest.fail("the relay hung up")


def test_a_stopped_session_is_given_up_in_the_middle_of_a_push(sshd, sglang):
    """SIGSTOP of the server's side while megabytes are on their way: an error in time, and nothing was changed.

    sarracenia#1587: keepalives do not notice it.
    """
    bundle, files = overlay_for(sglang.root)
    files = {p: d + b"#" * 3_000_000 + b"\n" for p, d in files.items()}
    bundle = overlay_with(bundle, files)
    before = listing(sglang.site)
    with open_transport(sshd.host(python=str(sglang.python))) as transport:
        plan = deploy.plan_push(transport, bundle, files)
        lose_patience(transport, 2.0)
        stopped = sessions_of(sshd)
        send(stopped, signal.SIGSTOP)
        try:
            with no_hang(), pytest.raises(ConnectionFailedError, match="no sign of life for 2 s"):
                deploy.push(transport, plan, files, operator="x")
        finally:
            send(stopped, signal.SIGCONT)
        assert stopped
        lose_patience(transport, HANG)
        assert differences(before, listing(sglang.site)) == []
        assert deploy.push(transport, deploy.plan_push(transport, bundle, files), files, operator="x").id == "d-0001"


def send(pids, number):
    for pid in pids:
        # A connection of an earlier test may end by itself at any moment.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def overlay_with(bundle, files):
    from dataclasses import replace

    from ddtree_overlay.manifest import Bundle, sha256

    return Bundle(bundle.release, tuple(replace(c, sha256=sha256(files[c.path])) for c in bundle.changes))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_push_that_is_cut_off_on_its_way_changes_nothing(sshd, sglang, pin, share):
    """The connection drops in mid-transfer: exit 8, the tree is as it was, and the same push works afterwards.

    paramiko#577: a transfer that ends early must not look like a shorter file.
    """
    bundle, files = overlay_for(sglang.root)
    before = listing(sglang.site)
    with Relay(sshd.port) as relay, open_transport(through(sshd, relay, pin, sglang.python)) as transport:
        plan = deploy.plan_push(transport, bundle, files)
        connected = relay.passed["up"]
    size = sum(len(d) for d in files.values())
    with (
        Relay(sshd.port, up=connected // 2 + int(size * share), drop=True) as relay,
        pytest.raises(ConnectionFailedError) as caught,
        open_transport(through(sshd, relay, pin, sglang.python)) as transport,
    ):
        deploy.push(transport, plan, files, operator="x")
    assert caught.value.exit_code == 8
    assert "status --host ct200" in caught.value.next_step
    assert differences(before, listing(sglang.site)) == []
    with open_transport(sshd.host(python=str(sglang.python))) as transport:
        assert deploy.push(transport, plan, files, operator="x").id == "d-0001"


def test_a_push_whose_answer_is_lost_is_finished_on_the_host(sshd, sglang, pin, tmp_path, monkeypatch):
    """The connection drops while the host is at work: it finishes alone, and `status` shows it."""
    bundle, files = overlay_for(sglang.root)
    there, go = tmp_path / "there", tmp_path / "go"

    def cut():
        until(there.exists)
        relay.hang_up()
        go.touch()

    with Relay(sshd.port) as relay, open_transport(through(sshd, relay, pin, sglang.python)) as transport:
        plan = deploy.plan_push(transport, bundle, files)
        thread = threading.Thread(target=cut)
        thread.start()
        with (
            sabotaged(monkeypatch, "swap", "put", 2, standing_still(tmp_path)),
            pytest.raises(ConnectionFailedError),
        ):
            deploy.push(transport, plan, files, operator="x")
        thread.join()
    with open_transport(sshd.host(python=str(sglang.python))) as transport:

        def seen():
            found = deploy.status(transport)
            return found.state, found.unfinished

        # The files are in place before whoever has put them there has let go of the lock.
        assert settled(seen, ("applied", "")) == ("applied", "")


def test_a_stalled_jump_host_does_not_hang_us(sshd, sglang, tmp_path):
    """The connection inside the stalled one is given up too, although it cannot say goodbye."""
    with SshServer.start(tmp_path / "inner", CACHE) as inner, Relay(sshd.port, up=300_000) as relay:
        known = tmp_path / "known_hosts"
        key = sshd.known_hosts.read_text().split(" ", 1)[1]
        known.write_text(f"[127.0.0.1]:{relay.port} {key}" + inner.known_hosts.read_text())
        config = tmp_path / "config"
        config.write_text(
            f"Host inside\n  HostName 127.0.0.1\n  Port {inner.port}\n  ProxyJump {sshd.user}@127.0.0.1:{relay.port}\n"
            f"Host *\n  IdentityFile {sshd.identity}\n  IdentityFile {inner.identity}\n"
        )
        plain = {"address": "inside", "port": None, "identity_file": None, "ssh_config": str(config)}
        host = inner.host(python=str(sglang.python), known_hosts=str(known), **plain)
        bundle, files = overlay_for(sglang.root)
        files = {p: d + b"#" * 5_000_000 + b"\n" for p, d in files.items()}
        bundle = overlay_with(bundle, files)
        with open_transport(host) as transport:
            plan = deploy.plan_push(transport, bundle, files)
            lose_patience(transport, 2.0)
            # Which of the two connections is found dead first is a matter of chance.
            with no_hang(), pytest.raises(ConnectionFailedError, match=r"no sign of life|no answer"):
                deploy.push(transport, plan, files, operator="x")


def test_a_busy_server_that_turns_one_away_late_is_asked_again(sshd, pin, tiny):
    """It hangs up without a word, but not within a second: it has much to do."""
    with Relay(sshd.port, late=1.5) as relay, open_transport(through(sshd, relay, pin, tiny.python)) as transport:
        assert deploy.status(transport).state == "pristine"


def test_a_server_that_turns_some_away_is_asked_again(tiny, tmp_path, monkeypatch):
    """Six connections at once through a door for two (MaxStartups), as a fleet's to its jump host (paramiko#664)."""
    # On a busy machine the two before take longer to log in than a client has patience for.
    monkeypatch.setattr(connect, "PAUSES", (*connect.PAUSES, *[4.0] * 20))

    def one(number):
        with open_transport(server.host(f"h{number}", str(tiny.python))) as transport:
            return deploy.status(transport).state

    with SshServer.start(tmp_path / "sshd", CACHE, options="MaxStartups 2") as server, ThreadPoolExecutor(6) as pool:
        assert list(pool.map(one, range(6))) == ["pristine"] * 6
        assert "MaxStartups" in server.log()
