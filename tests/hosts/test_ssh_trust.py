# SPDX-License-Identifier: Apache-2.0
"""Who is trusted over SSH, by which key: against a real sshd."""

from __future__ import annotations

import subprocess

import pytest
from tests.support.sshd import SshServer, new_lines
from tests.support.statuses import status_of
from tests.support.wheels import CACHE

from ddtree_overlay import deploy
from ddtree_overlay.errors import AuthenticationError, ConnectionFailedError, HostKeyError
from ddtree_overlay.hosts import hostkeys
from ddtree_overlay.hosts.transport import open_transport


def test_unknown_host_key_is_refused_before_any_credential(sshd, tmp_path):
    """No authentication attempt in the server's log, nothing written to known_hosts (CWE-295, fsspec#2119)."""
    empty = tmp_path / "known_hosts"
    empty.write_text("")
    before = sshd.log()
    with pytest.raises(HostKeyError, match="host key is unknown") as caught:
        status_of(sshd.host(known_hosts=str(empty)))
    text = str(caught.value)
    printed = subprocess.run(
        ["ssh-keygen", "-lf", sshd.folder / "host_ed25519.pub"], capture_output=True, text=True, check=True
    ).stdout.split()[1]
    assert caught.value.exit_code == 8
    assert all(part in text for part in ("127.0.0.1", str(sshd.port), "ssh-ed25519", printed, "--accept-new"))
    log = new_lines(sshd, before)
    assert "Connection from" in log
    assert not any(word in log for word in ("publickey", "Accepted", "Failed", "password"))
    assert empty.read_text() == ""


def test_accept_new_adds_one_line_and_keeps_the_others(sshd, tiny, tmp_path):
    """An unknown key is added on request; lines of other hosts stay byte for byte (paramiko#435)."""
    known = tmp_path / "known_hosts"
    known.write_text("@cert-authority *.x ssh-ed25519 AAAA\nother sk-type AAAA")
    host = sshd.host(python=str(tiny.python), known_hosts=str(known))
    assert status_of(host, accept_new=True).state == "pristine"
    lines = known.read_text().splitlines()
    assert lines[:2] == ["@cert-authority *.x ssh-ed25519 AAAA", "other sk-type AAAA"]
    assert lines[2:] == sshd.known_hosts.read_text().splitlines()
    assert status_of(host).state == "pristine"


def test_changed_host_key_is_refused_even_with_accept_new(sshd, tmp_path):
    """The message has port, both fingerprints, and file and line (paramiko#2229 leaves the port out)."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "other"], check=True)
    words = (tmp_path / "other.pub").read_text().split()
    known = tmp_path / "known_hosts"
    known.write_text(f"# comment\n[127.0.0.1]:{sshd.port} {words[0]} {words[1]}\n")
    with pytest.raises(HostKeyError, match="has changed") as caught:
        status_of(sshd.host(known_hosts=str(known)), accept_new=True)
    assert f"port {sshd.port}" in str(caught.value)
    assert f"{known}:2" in str(caught.value)
    assert f"ssh-keygen -R '[127.0.0.1]:{sshd.port}'" in caught.value.next_step


def test_bad_lines_of_known_hosts_are_skipped_with_a_warning(sshd, tiny, tmp_path):
    """A host CA, a corrupt line and an unknown marker do not make every host unknown (paramiko#490)."""
    known = tmp_path / "known_hosts"
    good = sshd.known_hosts.read_text()
    known.write_text(f"@cert-authority * ssh-ed25519 AAAA\n@odd x\nx ssh-ed25519 !!!\nshort\n{good}")
    with open_transport(sshd.host(python=str(tiny.python), known_hosts=str(known))) as transport:
        assert deploy.status(transport).state == "pristine"
        assert [w.split(":")[1] for w in transport.warnings] == ["1", "2", "3", "4"]


def test_revoked_host_key_is_refused(sshd, tmp_path):
    """@revoked wins over the line that knows the key, and over a pin."""
    known = tmp_path / "known_hosts"
    good = sshd.known_hosts.read_text()
    known.write_text(good + "@revoked * " + good.split(" ", 1)[1])
    pin = hostkeys.fingerprint(hostkeys.parse(good, "x")[0][0].blob)
    with pytest.raises(HostKeyError, match="revoked"):
        status_of(sshd.host(known_hosts=str(known), host_key_fingerprint=pin))


def test_hashed_known_hosts_are_understood(sshd, tiny, tmp_path):
    """`ssh-keygen -H` hides names; they are matched all the same."""
    known = tmp_path / "known_hosts"
    known.write_text(sshd.known_hosts.read_text())
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", known], check=True, capture_output=True)
    assert "127.0.0.1" not in known.read_text()
    assert status_of(sshd.host(python=str(tiny.python), known_hosts=str(known))).state == "pristine"


def test_a_pinned_fingerprint_decides(sshd, tiny, tmp_path):
    """The right pin needs no known_hosts; a wrong one is refused although known_hosts has the key."""
    pin = hostkeys.fingerprint(hostkeys.parse(sshd.known_hosts.read_text(), "x")[0][0].blob)
    host = sshd.host(python=str(tiny.python), known_hosts=str(tmp_path / "none"), host_key_fingerprint=pin)
    assert status_of(host).state == "pristine"
    with pytest.raises(HostKeyError, match="not the pinned one"):
        status_of(sshd.host(host_key_fingerprint="SHA256:" + "A" * 43))


def test_refused_keys_are_named(sshd, tmp_path):
    """The message lists what was offered, to whom, and says what to change."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "wrong"], check=True)
    with pytest.raises(AuthenticationError) as caught:
        status_of(sshd.host(identity_file=str(tmp_path / "wrong")))
    assert str(tmp_path / "wrong") in caught.value.why
    assert "identity_file" in caught.value.next_step


def test_a_key_with_a_passphrase_says_so(sshd, tmp_path):
    """Without an ssh agent such a key cannot be used; nothing asks on a terminal."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", tmp_path / "locked"], check=True)
    with pytest.raises(AuthenticationError, match="passphrase: ssh-add"):
        status_of(sshd.host(identity_file=str(tmp_path / "locked")))


def test_a_server_with_sha1_signatures_only(tmp_path, sshd):
    """Such a server is named for what it is, not as an obscure failure (netmiko#3852, airflow#69712)."""
    del sshd  # only to be skipped with it
    subprocess.run(["ssh-keygen", "-q", "-t", "rsa", "-b", "2048", "-N", "", "-f", tmp_path / "rsa"], check=True)
    options = f"HostKey {tmp_path}/rsa\nHostKeyAlgorithms ssh-rsa"
    with (
        SshServer.start(tmp_path / "old", CACHE, options=options) as server,
        pytest.raises(ConnectionFailedError, match="no common algorithms") as caught,
    ):
        status_of(server.host())
    assert "SHA-1" in caught.value.why
