# SPDX-License-Identifier: Apache-2.0
"""known_hosts, read line by line: one bad line must not make every host unknown (paramiko drops the whole file)."""

from __future__ import annotations

import base64
import binascii
import enum
import fnmatch
import hashlib
import hmac
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


class Verdict(enum.Enum):
    """What known_hosts says about a key."""

    KNOWN = "known"
    UNKNOWN = "unknown"
    CHANGED = "changed"
    REVOKED = "revoked"


@dataclass(frozen=True, slots=True)
class KnownKey:
    """One usable line of a known_hosts file; `blob` is the key as it travels on the wire."""

    file: str
    line: int
    hosts: str
    key_type: str
    blob: bytes
    revoked: bool


def lookup_name(host: str, port: int) -> str:
    """The name that known_hosts uses for a host and port."""
    return host.lower() if port == 22 else f"[{host.lower()}]:{port}"


def fingerprint(blob: bytes) -> str:
    """`SHA256:…` as OpenSSH prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def parse(text: str, file: str) -> tuple[list[KnownKey], list[str]]:
    """The usable keys of a known_hosts file, and a warning for each line that cannot be used."""
    keys, warnings = [], []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        revoked = words[0] == "@revoked"
        if words[0].startswith("@") and not revoked:
            reason = (
                "host certificate authorities are not supported" if words[0] == "@cert-authority" else "unknown marker"
            )
            warnings.append(f"{file}:{number}: {words[0]} skipped: {reason}")
            continue
        if revoked:
            words = words[1:]
        blob = _blob(words)
        if blob is None:
            warnings.append(f"{file}:{number}: skipped: not a host key")
            continue
        keys.append(KnownKey(file, number, words[0], words[1], blob, revoked))
    return keys, warnings


def _blob(words: list[str]) -> bytes | None:
    """The decoded key of `hosts type base64`, or None unless it says the same type inside."""
    if len(words) < 3:
        return None
    try:
        blob = base64.b64decode(words[2], validate=True)
    except (binascii.Error, ValueError):
        return None
    kind = words[1].encode()
    return blob if blob.startswith(len(kind).to_bytes(4, "big") + kind) else None


def load(paths: Iterable[Path]) -> tuple[list[KnownKey], list[str]]:
    """The keys of every file of `paths` that exists, and the warnings."""
    keys: list[KnownKey] = []
    warnings: list[str] = []
    for path in paths:
        try:
            text = path.read_text("utf-8", "surrogateescape")
        except FileNotFoundError:
            continue
        except OSError as e:
            warnings.append(f"{path} cannot be read: {e.strerror}")
            continue
        found, said = parse(text, str(path))
        keys += found
        warnings += said
    return keys, warnings


def matching(keys: Iterable[KnownKey], name: str) -> list[KnownKey]:
    """The keys whose host field covers `name` (a `lookup_name`)."""
    return [k for k in keys if _covers(k.hosts, name)]


def _covers(hosts: str, name: str) -> bool:
    if hosts.startswith("|1|"):
        try:
            salt, digest = (base64.b64decode(part, validate=True) for part in hosts[3:].split("|"))
        except (binascii.Error, ValueError):
            return False
        return hmac.compare_digest(hmac.new(salt, name.encode(), hashlib.sha1).digest(), digest)
    covered = False
    for pattern in hosts.lower().split(","):
        wanted = pattern.removeprefix("!")
        # `[host]:port` holds brackets, which would be a character class; only * and ? are wildcards here.
        if fnmatch.fnmatchcase(name, wanted.replace("[", "[[]")):
            if pattern.startswith("!"):
                return False
            covered = True
    return covered


def judge(keys: Iterable[KnownKey], name: str, blob: bytes) -> tuple[Verdict, KnownKey | None]:
    """What `keys` say about the key `blob` of the host `name`, and the line that decided.

    A revoked key is refused whatever name its line has for it, as long as the line covers this host. A host that is
    known by other keys only has changed its key.
    """
    mine = matching(keys, name)
    for key in mine:
        if key.revoked and key.blob == blob:
            return Verdict.REVOKED, key
    good = [k for k in mine if not k.revoked]
    for key in good:
        if key.blob == blob:
            return Verdict.KNOWN, key
    return (Verdict.CHANGED, good[0]) if good else (Verdict.UNKNOWN, None)


def remember(path: Path, name: str, key_type: str, blob: bytes) -> None:
    """Append one line to a known_hosts file; what is in it stays as it is."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    line = f"{name} {key_type} {base64.b64encode(blob).decode()}\n".encode()
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(fd, "ab+") as stream:
        if stream.seek(0, os.SEEK_END) and _last_byte(stream.fileno()) != b"\n":
            line = b"\n" + line
        stream.write(line)


def _last_byte(fd: int) -> bytes:
    return os.pread(fd, 1, os.fstat(fd).st_size - 1)
