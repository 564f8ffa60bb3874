# SPDX-License-Identifier: Apache-2.0
"""`deploy.toml`: the hosts that can be deployed to, read into frozen dataclasses that hold no surprises."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ddtree_overlay.config_keys import (
    COMMANDS,
    HEALTH_KEYS,
    HOST_KEYS,
    problem,
    suggestion,
    words_of,
    words_problem,
)
from ddtree_overlay.errors import ConfigError


CONFIG_NAME = "deploy.toml"
_TABLES = ("defaults", "hosts", "groups")
#: Host names become folder names and lock names, so they are kept plain.
#: The snapshot of a release is kept under such a name; that of a host would take its place.
_RELEASE_NAME = re.compile(r"sglang-\d+\.\d")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")


@dataclass(frozen=True, slots=True)
class Health:
    """How to tell that a host's server is well: `url` is where it listens, as seen from the host itself.

    `timeout` is how long it may take to come up. `api_key_file` names a file on the host with the server's API key.
    """

    url: str
    timeout: float = 300.0
    api_key_file: str | None = None


@dataclass(frozen=True, slots=True)
class Host:
    """One host of `deploy.toml`, with `[defaults]` already merged in.

    `root` is never read from the file: `--root PATH` sets it, to work on a package folder of this machine.
    """

    name: str
    address: str
    port: int | None = None
    user: str | None = None
    python: str = "python3"
    transport: str = "ssh"
    identity_file: str | None = None
    known_hosts: str | None = None
    host_key_fingerprint: str | None = None
    ssh_config: str | None = None
    timeout: float = 60.0
    exec_prefix: tuple[str, ...] = ()
    restart: tuple[str, ...] = ()
    restart_unit: str | None = None
    restart_timeout: float = 120.0
    health: Health | None = None
    root: str | None = None

    @property
    def restartable(self) -> bool:
        """Whether `--restart` can be asked for: it is known how the server is restarted, and where it answers."""
        return not self.root and bool(self.restart or self.restart_unit) and self.health is not None


@dataclass(frozen=True, slots=True)
class Deploy:
    """A whole `deploy.toml`; `path` is None when no file was found."""

    path: Path | None = None
    hosts: Mapping[str, Host] = field(default_factory=dict)
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def host(self, name: str) -> Host:
        """The host called `name`.

        Raises:
            ConfigError: No host has that name; close matches are suggested.
        """
        if name in self.hosts:
            return self.hosts[name]
        if name in self.groups:
            raise ConfigError(f"{name!r} is a group, not a host", next_step=f"use --group {name}")
        if not _NAME.match(name):
            raise ConfigError(
                f"unknown host {name!r}: a host is named by its table in {CONFIG_NAME}, not by user or address",
                next_step="write a [hosts.NAME] table with `address`, and `user` or `port` if needed",
            )
        if self.path is None:
            raise ConfigError(
                f"unknown host {name!r}: no {CONFIG_NAME} was found",
                next_step=f"write a {CONFIG_NAME} with a [hosts.{name}] table, or name one with --config FILE",
            )
        known = ", ".join(self.hosts) or "none"
        raise ConfigError(
            f"unknown host {name!r}{suggestion(name, self.hosts)}",
            why=f"{self.path} knows these hosts: {known}",
            next_step=f"use one of them, or add a [hosts.{name}] table to {self.path}",
        )

    def group(self, name: str) -> tuple[str, ...]:
        """The names of the hosts in the group called `name`.

        Raises:
            ConfigError: No group has that name, or it is empty.
        """
        if self.groups.get(name):
            return self.groups[name]
        if name in self.groups:
            raise ConfigError(f"group {name!r} has no hosts", next_step=f"name some in [groups] of {self.path}")
        if name in self.hosts:
            raise ConfigError(f"{name!r} is a host, not a group", next_step=f"use --host {name}")
        known = f"{self.path} knows these groups: {', '.join(self.groups) or 'none'}"
        raise ConfigError(
            f"unknown group {name!r}{suggestion(name, self.groups)}",
            why=known if self.path else f"no {CONFIG_NAME} was found",
            next_step=f'write {name} = ["HOST", "HOST"] below [groups] in {self.path or CONFIG_NAME}',
        )


def load_config(path: Path | None) -> Deploy:
    """Read `path`; None means that there is no file, which is fine until a host is asked for.

    Raises:
        ConfigError: The file is missing, is not TOML, or holds an unknown key or a value of the wrong type.
    """
    if path is None:
        return Deploy()
    try:
        # Editors of another system put a byte order mark in front; TOML knows none.
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror}", next_step="name another file with --config FILE") from e
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path} is not UTF-8 text", why=str(e), next_step=f"save {path} as UTF-8") from e
    return parse_config(text, path)


def parse_config(text: str, path: Path) -> Deploy:
    """Read the text of a `deploy.toml`; `path` is only named in messages. Raises as `load_config`."""
    raw = _parse_toml(text, path)
    _check_keys(raw, _TABLES, path, "the top level")
    defaults = _table(raw.get("defaults", {}), path, "[defaults]")
    _check_values(defaults, path, "[defaults]")
    hosts = {}
    for name, table in _table(raw.get("hosts", {}), path, "[hosts]").items():
        where = f"[hosts.{name}]"
        _check_name(name, path, where)
        _check_values(_table(table, path, where), path, where)
        hosts[name] = _host(name, defaults, table, path)
    return Deploy(path, hosts, _groups(raw.get("groups", {}), hosts, path))


def _host(name: str, defaults: Mapping[str, Any], table: Mapping[str, Any], path: Path) -> Host:
    # The two ways of restarting exclude each other: a host that names one does not inherit the other.
    ways = {"restart", "restart_unit"}
    inherited = {k: v for k, v in defaults.items() if k not in ways or not ways & table.keys()}
    values = {"address": name, **inherited, **table}
    if ways <= values.keys():
        raise ConfigError(
            f"{path}: [hosts.{name}] has both 'restart' and 'restart_unit'",
            why="a server is restarted in one way",
            next_step=f"remove one of them from {path}",
        )
    health = {**inherited.get("health", {}), **table.get("health", {})}
    values.pop("health", None)
    # [defaults] alone may give a timeout without knowing where any server listens.
    if "url" in health or "health" in table:
        values["health"] = _health(health, path, f"[hosts.{name}.health]")
    for key in ("timeout", "restart_timeout"):
        if key in values:
            values[key] = float(values[key])
    for key in COMMANDS:
        if key in values:
            values[key] = words_of(values[key])
    return Host(name=name, **values)


def _health(values: Mapping[str, Any], path: Path, where: str) -> Health:
    if "url" not in values:
        raise ConfigError(
            f"{path}: {where} has no url",
            next_step=f'write url = "http://127.0.0.1:30000" there, or wherever the server listens, in {path}',
        )
    found = Health(**values)
    return replace(found, timeout=float(found.timeout))


def _parse_toml(text: str, path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        parsed: dict[str, Any] = tomllib.loads(text)
    except RecursionError as e:
        raise ConfigError(f"{path}: nested too deeply", next_step=f"correct {path} and run the command again") from e
    except tomllib.TOMLDecodeError as e:
        # Before 3.14 the position is only in the message: "… (at line 3, column 7)".
        at = re.search(r"\(at (?:line (\d+)|end of document)", str(e))
        line = int(at[1]) if at and at[1] else max(1, len(text.splitlines()))
        raise ConfigError(
            f"{path}:{line}: broken TOML",
            why=str(e),
            next_step=f"correct line {line} of {path} and run the command again",
        ) from e
    return parsed


def _groups(raw: object, hosts: Mapping[str, Host], path: Path) -> dict[str, tuple[str, ...]]:
    groups = {}
    for name, members in _table(raw, path, "[groups]").items():
        where = f"group {name!r} in [groups]"
        if not isinstance(members, list) or not all(isinstance(m, str) for m in members):
            raise ConfigError(f"{path}: {where} must be a list of host names", next_step=f'write {name} = ["…", "…"]')
        for member in members:
            if member not in hosts:
                raise ConfigError(
                    f"{path}: {where} names the unknown host {member!r}{suggestion(member, hosts)}",
                    next_step=f"add a [hosts.{member}] table or take {member!r} out of the group",
                )
        groups[name] = tuple(members)
    return groups


def _check_values(
    table: Mapping[str, Any], path: Path, where: str, known: Mapping[str, tuple[type, ...]] = HOST_KEYS
) -> None:
    _check_keys(table, known, path, where)
    for key, value in table.items():
        kinds = known[key]
        # bool is an int in Python, but `port = true` is a mistake in a configuration.
        if isinstance(value, bool) or not isinstance(value, kinds):
            names = " or ".join("a table" if k is dict else k.__name__ for k in kinds)
            raise ConfigError(
                f"{path}: {key!r} in {where} must be {names}, not {type(value).__name__}",
                next_step=f"correct {key!r} in {path}",
            )
        if isinstance(value, dict):
            _check_values(value, path, f"{where[:-1]}.{key}]", HEALTH_KEYS)
            continue
        wrong = words_problem(key, value) if key in COMMANDS else problem(key, value)
        if wrong:
            raise ConfigError(f"{path}: {key} = {value!r} in {where}: {wrong}", next_step=f"correct {key!r} in {path}")


def _check_keys(table: Mapping[str, Any], known: Iterable[str], path: Path, where: str) -> None:
    known = tuple(known)
    for key in table:
        if key not in known:
            raise ConfigError(
                f"{path}: unknown key {key!r} in {where}{suggestion(key, known)}",
                why=f"known there: {', '.join(known)}",
                next_step=f"correct or remove {key!r} in {path}",
            )


def _check_name(name: str, path: Path, where: str) -> None:
    if not _NAME.match(name):
        raise ConfigError(
            f"{path}: {where}: a host name may hold letters, digits, '.', '_' and '-' only",
            next_step="give the table a plain name and put the real one into `address`",
        )
    if _RELEASE_NAME.match(name):
        raise ConfigError(
            f"{path}: {where}: this is what the snapshot of a published release is called",
            next_step="give the table another name and put the real one into `address`",
        )


def _table(value: object, path: Path, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: {where} must be a table", next_step=f"see the example {CONFIG_NAME}")
    return value
