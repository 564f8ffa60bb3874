# SPDX-License-Identifier: Apache-2.0
"""What each key of `deploy.toml` may hold. Pure functions of a key and its value."""

from __future__ import annotations

import difflib
import ipaddress
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit


#: Seconds; a day without any progress is no patience any more, and sockets cannot count much further.
MAX_TIMEOUT = 86400
TRANSPORTS = ("ssh", "local")
#: Parts between single dots, each at most as long as the name service allows; or an IPv6 address.
_ADDRESS = re.compile(r"[^\s.]{1,63}(\.[^\s.]{1,63})*\.?\Z|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%\S+)?\Z")
_UNIT = re.compile(r"[A-Za-z0-9:_@][A-Za-z0-9:_.@\\-]*\Z")

#: Key of a host table -> the types TOML may give it.
HOST_KEYS: Mapping[str, tuple[type, ...]] = {
    "address": (str,),
    "port": (int,),
    "user": (str,),
    "python": (str,),
    "transport": (str,),
    "identity_file": (str,),
    "known_hosts": (str,),
    "host_key_fingerprint": (str,),
    "ssh_config": (str,),
    "timeout": (int, float),
    "exec_prefix": (str, list),
    "restart": (str, list),
    "restart_unit": (str,),
    "restart_timeout": (int, float),
    "health": (dict,),
}
HEALTH_KEYS: Mapping[str, tuple[type, ...]] = {"url": (str,), "timeout": (int, float), "api_key_file": (str,)}
#: Keys that hold a command: words, or a line that is split as a shell would.
COMMANDS = ("exec_prefix", "restart")

_SECONDS = f"must be a positive number of seconds, at most {MAX_TIMEOUT}"
_RULES = {
    "port": "must be between 1 and 65535",
    "timeout": _SECONDS,
    "restart_timeout": _SECONDS,
    "url": "must look like http://127.0.0.1:30000, where the server listens as seen from the host",
    "api_key_file": "must be an absolute path on the host",
    "restart_unit": "must be the name of one systemd unit, such as sglang.service",
    "host_key_fingerprint": "must look like SHA256:… (as `ssh-keygen -lf` prints it)",
    "address": "must be a host name or an address",
}


def problem(key: str, value: Any) -> str:
    """What is wrong with the value of `key`, or ""."""
    if isinstance(value, str) and not value.strip():
        return "must not be empty"
    if isinstance(value, str) and not value.isprintable():
        return "must not hold control characters"
    wrong = {
        "transport": lambda: value not in TRANSPORTS,
        "port": lambda: not 0 < value < 65536,
        "timeout": lambda: not 0 < value <= MAX_TIMEOUT,
        "restart_timeout": lambda: not 0 < value <= MAX_TIMEOUT,
        "restart_unit": lambda: not _UNIT.match(value),
        "url": lambda: not _is_url(value),
        "api_key_file": lambda: not value.startswith("/"),
        "host_key_fingerprint": lambda: not value.startswith("SHA256:"),
        "address": lambda: not _ADDRESS.match(value),
    }
    if key not in wrong or not wrong[key]():
        return ""
    if key == "transport":
        return f"must be one of {', '.join(TRANSPORTS)}{suggestion(value, TRANSPORTS)}"
    return _RULES[key]


def _is_url(value: str) -> bool:
    try:
        parts = urlsplit(value)
        port = parts.port
    except ValueError:
        return False
    plain = not (parts.query or parts.fragment or parts.username or " " in value)
    return parts.scheme in {"http", "https"} and bool(parts.hostname) and port != 0 and plain


def is_loopback(address: str) -> bool:
    """Whether `address` means the machine that uses it, and can be reached from no other."""
    if address.rstrip(".").lower() == "localhost":
        return True
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    # A server that listens on every address (0.0.0.0) is asked there by its own machine only.
    return found.is_loopback or found.is_unspecified


def words_of(command: str | list[str]) -> tuple[str, ...]:
    """The words of a command, which may be written as a shell would split it or as a list. No shell ever sees it."""
    return tuple(shlex.split(command) if isinstance(command, str) else command)


def words_problem(key: str, value: Any) -> str:
    """What is wrong with the command in `key`, or ""."""
    if isinstance(value, list) and not all(isinstance(word, str) and word for word in value):
        return "must hold words only"
    try:
        words = words_of(value)
    except ValueError as e:
        return f"cannot be split into words: {e}"
    if any("\n" in word or "\0" in word for word in words):
        return "a word must not hold a line feed or a NUL"
    return "must name a program" if key == "restart" and not words else ""


def suggestion(word: str, known: Iterable[str]) -> str:
    """The names in `known` that `word` may have been meant to be, in words, or ""."""
    close = difflib.get_close_matches(word, list(known), n=2, cutoff=0.6)
    return f" (did you mean {' or '.join(repr(c) for c in close)}?)" if close else ""
