# SPDX-License-Identifier: Apache-2.0
"""The user's own ssh configuration, agent and known_hosts, against real sshds: who is asked, and what is offered."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from tests.hosts.test_ssh import new_lines, status_of
from tests.support.sshd import SshServer
from tests.support.waiting import HANG, no_hang, patience, timed, until
from tests.support.wheels import CACHE

from ddtree_overlay.errors import AuthenticationError, ConfigError, HostKeyError
from ddtree_overlay.hosts import hostkeys
from ddtree_overlay.hosts.resolve import route


#: Nothing of deploy.toml but the name: all else comes from the ssh configuration.
BARE = {"port": None, "user": None, "identity_file": None, "known_hosts": None}


def keygen(path, *options):
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path, *options], check=True)
    return path


@pytest.fixture
def agent(tmp_path, monkeypatch):
    """An ssh agent with eight keys, more than MaxAuthTries (6); the right one is the last."""
    socket = tmp_path / "agent"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", socket], stdout=subprocess.DEVNULL)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(socket))
    keys = [keygen(tmp_path / f"key{n}") for n in range(8)]
    try:
        # 2: there is no agent yet.
        until(lambda: subprocess.run(["ssh-add", "-l"], check=False, capture_output=True).returncode != 2)
        subprocess.run(["ssh-add", "-q", *keys], check=True, timeout=HANG)
        yield keys
    finally:
        process.terminate()
        process.wait(timeout=HANG)


@pytest.fixture
def picky(tmp_path, sshd, agent):
    """An sshd that lets only the agent's last key in."""
    del sshd  # only to be skipped with it
    with SshServer.start(tmp_path / "picky", CACHE, options=f"AuthorizedKeysFile {agent[-1]}.pub") as server:
        yield server


def offered(log):
    """How often each key was offered, by fingerprint; an accepted key is logged twice."""
    lines = [line for line in log.splitlines() if "publickey" in line and "SHA256:" in line]
    return Counter(line.split("SHA256:")[1].split()[0] for line in lines)


def test_an_agent_with_more_keys_than_the_server_has_patience_for(picky, agent, tiny, tmp_path):
    """With IdentitiesOnly just the configured key is offered, from the agent, although eight are there (fabric#2215).

    `Too many authentication failures` is what a client gets that offers all of them.
    """
    agent[-1].unlink()  # only the agent has the private half
    config = tmp_path / "config"
    config.write_text(
        f"Host picky\n  HostName 127.0.0.1\n  Port {picky.port}\n  User {picky.user}\n"
        f"  UserKnownHostsFile {picky.known_hosts}\n  IdentitiesOnly yes\n  IdentityFile {agent[-1]}.pub\n"
    )
    before = picky.log()
    host = picky.host(python=str(tiny.python), address="picky", **{**BARE, "ssh_config": str(config)})
    assert status_of(host).state == "pristine"
    blob = hostkeys.parse("x " + Path(f"{agent[-1]}.pub").read_text(), "x")[0][0].blob
    assert set(offered(new_lines(picky, before))) == {hostkeys.fingerprint(blob).removeprefix("SHA256:")}


def test_identity_file_of_deploy_toml_is_the_only_key_that_is_offered(picky, agent, tiny):
    """The same without any ssh configuration: `identity_file` names the key, the agent may hold it."""
    before = picky.log()
    assert status_of(picky.host(python=str(tiny.python), identity_file=str(agent[-1]))).state == "pristine"
    assert len(offered(new_lines(picky, before))) == 1


def test_without_a_choice_the_first_keys_are_offered_and_the_rest_is_named(picky, agent):
    """The server is not annoyed with all eight keys; the message says how to pick one."""
    before = picky.log()
    with pytest.raises(AuthenticationError, match="only the first 5 keys were offered; set IdentitiesOnly"):
        status_of(picky.host(identity_file=None))
    assert len(offered(new_lines(picky, before))) <= 5
    assert agent


def test_identity_agent_none_keeps_the_agent_out(picky, agent, tiny, tmp_path):
    """`IdentityAgent none` and a socket of one's own mean what they mean to ssh."""
    config = tmp_path / "config"
    config.write_text("Host *\n  IdentityAgent none\n")
    key = agent[-1].rename(tmp_path / "elsewhere")
    host = picky.host(python=str(tiny.python), identity_file=str(key), ssh_config=str(config))
    assert status_of(host).state == "pristine"
    with pytest.raises(AuthenticationError, match="no key"):
        status_of(picky.host(identity_file=str(agent[-1]), ssh_config=str(config)))
    config.write_text(f"Host *\n  IdentityAgent {os.environ.pop('SSH_AUTH_SOCK')}\n")
    assert status_of(picky.host(identity_file=str(agent[-1]), ssh_config=str(config), python=str(tiny.python)))


def test_an_agent_that_does_not_answer_is_passed_over(sshd, tiny, tmp_path, monkeypatch):
    """A locked keyring must not hang the deploy: after the timeout the key file is used."""
    import socket

    host = sshd.host(python=str(tiny.python))
    _, took = timed(lambda: status_of(host))
    short = patience(2.0, took)
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(tmp_path / "mute"))
        mute.listen()
        monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "mute"))
        with no_hang(short + HANG):
            found, took = timed(lambda: status_of(replace(host, timeout=short)))
    assert found.state == "pristine"
    assert took >= short


def test_match_and_include_are_resolved(sshd, tiny, tmp_path):
    """`Match exec`, `Match originalhost` and a chain of Includes decide, as they do for ssh (paramiko#1044, #2416)."""
    (tmp_path / "deep").write_text(f"Match originalhost gpu-7 exec true\n  Port {sshd.port}\n  User {sshd.user}\n")
    (tmp_path / "inner").write_text(f"Include {tmp_path}/deep\nMatch originalhost gpu-7 exec false\n  Port 1\n")
    config = tmp_path / "config"
    config.write_text(
        f"Include {tmp_path}/inner\nHost gpu-*\n  HostName 127.0.0.1\n  IdentitiesOnly yes\n"
        f"  IdentityFile {sshd.identity}\n  UserKnownHostsFile {sshd.known_hosts}\n"
    )
    host = sshd.host(python=str(tiny.python), address="gpu-7", **{**BARE, "ssh_config": str(config)})
    assert status_of(host).state == "pristine"


@pytest.fixture
def chain(sshd, tmp_path):
    """Three sshds: `sshd`, then one behind it, then one behind that; with a known_hosts file and a configuration."""
    with (
        SshServer.start(tmp_path / "second", CACHE) as second,
        SshServer.start(tmp_path / "third", CACHE) as third,
    ):
        servers = [sshd, second, third]
        known = tmp_path / "known_hosts"
        known.write_text("".join(s.known_hosts.read_text() for s in servers))
        entries = [
            f"Host {name}\n  HostName 127.0.0.1\n  Port {s.port}\n  User {s.user}\n  IdentityFile {s.identity}\n"
            for name, s in zip(("first", "second", "third"), servers, strict=True)
        ]
        yield servers, known, entries


@pytest.mark.parametrize("written", ["one line", "hop by hop", "addresses"])
def test_a_chain_of_jump_hosts(chain, tiny, tmp_path, written):
    """ProxyJump over two hosts, in each way it can be written; every hop logs in with its own key (sshtunnel#244)."""
    (first, second, third), known, entries = chain
    jumps = {
        "one line": ["", "", "  ProxyJump first,second\n"],
        "hop by hop": ["", "  ProxyJump first\n", "  ProxyJump second\n"],
        "addresses": ["", "", f"  ProxyJump {first.user}@127.0.0.1:{first.port},ssh://127.0.0.1:{second.port}\n"],
    }[written]
    config = tmp_path / "config"
    keys = f"Host 127.0.0.1\n  IdentityFile {first.identity}\n  IdentityFile {second.identity}\n"
    config.write_text("".join(e + j for e, j in zip(entries, jumps, strict=True)) + keys)
    host = third.host(
        python=str(tiny.python), address="third", **{**BARE, "ssh_config": str(config), "known_hosts": str(known)}
    )
    assert [h.endpoint.port for h in route(host, [])] == [first.port, second.port, third.port]
    before = [s.log() for s in (first, second, third)]
    assert status_of(host).state == "pristine"
    for server, log in zip((first, second, third), before, strict=True):
        assert "Accepted publickey" in new_lines(server, log)


@pytest.mark.parametrize("stranger", [0, 1, 2])
def test_each_hop_proves_its_key_before_it_gets_a_credential(chain, tiny, tmp_path, stranger):
    """An unknown hop is named with port, type and fingerprint; no server from there on sees a login (CWE-295)."""
    servers, known, entries = chain
    known.write_text("".join(s.known_hosts.read_text() for s in servers if s is not servers[stranger]))
    config = tmp_path / "config"
    config.write_text("".join(entries) + "  ProxyJump first,second\n")
    host = servers[2].host(
        python=str(tiny.python), address="third", **{**BARE, "ssh_config": str(config), "known_hosts": str(known)}
    )
    before = [s.log() for s in servers]
    with pytest.raises(HostKeyError, match="host key is unknown") as caught:
        status_of(host)
    key = hostkeys.parse(servers[stranger].known_hosts.read_text(), "x")[0][0]
    text = str(caught.value)
    assert all(w in text for w in (f"port {servers[stranger].port}", "ssh-ed25519", hostkeys.fingerprint(key.blob)))
    new = new_lines(servers[stranger], before[stranger])
    assert "Connection from" in new
    assert "publickey" not in new
    for server, log in list(zip(servers, before, strict=True))[stranger + 1 :]:
        # The end of an earlier connection may be logged late; a new one may not be there.
        assert "Connection from" not in server.log()[len(log) :]
    lines = known.read_text()
    assert status_of(host, accept_new=True).state == "pristine"
    assert known.read_text() == lines + servers[stranger].known_hosts.read_text()


def test_a_circle_of_jump_hosts_is_refused(sshd, tmp_path):
    """`ssh` would start itself without end; here the way is named."""
    config = tmp_path / "config"
    config.write_text("Host a\n  HostName 192.0.2.1\n  ProxyJump b\nHost b\n  HostName 192.0.2.2\n  ProxyJump a\n")
    with pytest.raises(ConfigError, match="form a circle") as caught:
        status_of(sshd.host(address="a", port=None, ssh_config=str(config)))
    assert "192.0.2.1 port 22 -> 192.0.2.2 port 22 -> 192.0.2.1 port 22" in caught.value.why
