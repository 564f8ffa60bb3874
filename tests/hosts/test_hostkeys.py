# SPDX-License-Identifier: Apache-2.0
"""known_hosts as OpenSSH reads it; `ssh-keygen` is the judge where it can be."""

from __future__ import annotations

import subprocess

import pytest

from ddtree_overlay.hosts import hostkeys
from ddtree_overlay.hosts.hostkeys import Verdict


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Two public keys as (type, base64)."""
    folder = tmp_path_factory.mktemp("keys")
    found = []
    for name in ("a", "b"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
        kind, data, *_ = (folder / f"{name}.pub").read_text().split()
        found.append((kind, data))
    return found


def judged(text, name, key):
    loaded, _ = hostkeys.parse(text, "known_hosts")
    blob = hostkeys.parse(f"x {key[0]} {key[1]}", "x")[0][0].blob
    return hostkeys.judge(loaded, name, blob)[0]


@pytest.mark.parametrize(
    ("hosts", "name", "verdict"),
    [
        ("ct200", "ct200", Verdict.KNOWN),
        ("CT200", "ct200", Verdict.KNOWN),
        ("other,ct200", "ct200", Verdict.KNOWN),
        ("ct201", "ct200", Verdict.UNKNOWN),
        ("ct200", "[ct200]:2222", Verdict.UNKNOWN),
        ("[ct200]:2222", "[ct200]:2222", Verdict.KNOWN),
        ("[ct200]:2222", "ct200", Verdict.UNKNOWN),
        ("ct*", "ct200", Verdict.KNOWN),
        ("ct20?", "ct200", Verdict.KNOWN),
        ("ct*,!ct200", "ct200", Verdict.UNKNOWN),
        ("[ct*]:2222", "[ct200]:2222", Verdict.KNOWN),
        ("[c]t200", "ct200", Verdict.UNKNOWN),
    ],
)
def test_host_fields(keys, hosts, name, verdict):
    """Names, lists, ports, wildcards and negations mean what they mean to OpenSSH (table P1-P5, paramiko#1793)."""
    assert judged(f"{hosts} {keys[0][0]} {keys[0][1]}\n", name, keys[0]) is verdict


def test_two_keys_of_one_type_for_one_host(keys):
    """Either of them is right (paramiko tries only the first); a third one is a change."""
    text = f"ct200 {keys[0][0]} {keys[0][1]}\nct200 {keys[1][0]} {keys[1][1]}\n"
    assert judged(text, "ct200", keys[0]) is Verdict.KNOWN
    assert judged(text, "ct200", keys[1]) is Verdict.KNOWN
    assert judged(f"ct200 {keys[0][0]} {keys[0][1]}\n", "ct200", keys[1]) is Verdict.CHANGED


@pytest.mark.parametrize("name", ["ct200", "[ct200]:2222"])
def test_hashed_names(keys, tmp_path, name):
    """What `ssh-keygen -H` wrote is found under its name and no other."""
    file = tmp_path / "known_hosts"
    file.write_text(f"{name} {keys[0][0]} {keys[0][1]}\n")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", file], check=True, capture_output=True)
    assert judged(file.read_text(), name, keys[0]) is Verdict.KNOWN
    assert judged(file.read_text(), "ct201", keys[0]) is Verdict.UNKNOWN


def test_fingerprint_is_the_one_that_openssh_prints(keys, tmp_path):
    """The operator compares it with `ssh-keygen -lf`."""
    (tmp_path / "k.pub").write_text(f"{keys[0][0]} {keys[0][1]}\n")
    printed = subprocess.run(["ssh-keygen", "-lf", tmp_path / "k.pub"], capture_output=True, text=True, check=True)
    blob = hostkeys.parse(f"x {keys[0][0]} {keys[0][1]}", "x")[0][0].blob
    assert hostkeys.fingerprint(blob) == printed.stdout.split()[1]


@pytest.mark.parametrize(
    "line", ["one", "a b", "h ssh-ed25519 ***", "h ssh-ed25519 AAAA", "|1|x|y ssh-rsa AAAA", "@odd h t k"]
)
def test_bad_lines_cost_only_themselves(keys, line):
    """Each is skipped with file and line; the good line after it still counts (paramiko#490, PR#1156)."""
    text = f"{line}\nct200 {keys[0][0]} {keys[0][1]}\n"
    loaded, warnings = hostkeys.parse(text, "known_hosts")
    assert [w.split(":")[:2] for w in warnings] == [["known_hosts", "1"]]
    assert [k.hosts for k in loaded] == ["ct200"]


def test_a_line_is_appended_after_one_without_line_feed(keys, tmp_path):
    """The file of the user is never rewritten, and two lines never become one."""
    file = tmp_path / "ssh/known_hosts"
    file.parent.mkdir()
    file.write_bytes(b"# mine\nold line without end")
    blob = hostkeys.parse(f"x {keys[0][0]} {keys[0][1]}", "x")[0][0].blob
    hostkeys.remember(file, "ct200", keys[0][0], blob)
    assert file.read_text() == f"# mine\nold line without end\nct200 {keys[0][0]} {keys[0][1]}\n"
