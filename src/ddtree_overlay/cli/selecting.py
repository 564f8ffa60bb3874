# SPDX-License-Identifier: Apache-2.0
"""What a verb works on: one installed, published or serving SGLang, or the hosts of a fleet."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ddtree_overlay.config import Host
from ddtree_overlay.config_keys import problem
from ddtree_overlay.errors import UsageError
from ddtree_overlay.manifest import sha256
from ddtree_overlay.reports import listed


if TYPE_CHECKING:
    from ddtree_overlay.cli.options import App


_WORDS = {"--host": "NAME", "--group": "NAME", "--release": "VERSION", "--url": "URL", "--root": "PATH"}


@dataclass(frozen=True, slots=True)
class Target:
    """One SGLang: a host, a package folder, a release, or a server. `name` is what it is called, its snapshot too.

    A server is called by its address and port, as in its URL.
    """

    name: str
    flag: str
    host: Host | None = None
    release: str | None = None
    url: str | None = None

    def command(self, verb: str) -> str:
        """The command line that runs `verb` on this target."""
        return f"ddtree-overlay {verb} {self.flag}"

    @property
    def place(self) -> Host:
        """The host or folder; only for verbs that take no `--release`."""
        assert self.host is not None
        return self.host


@dataclass(frozen=True, slots=True)
class Fleet:
    """Several hosts, each once, in the order they were named; `label` is what they are called together."""

    label: str
    flag: str
    targets: tuple[Target, ...]
    #: Further options that were given and belong into every command that is advised.
    others: tuple[str, ...] = ()

    def command(self, verb: str) -> str:
        """The command line that runs `verb` on all of them."""
        return f"ddtree-overlay {verb} {self.flag}"

    def command_for(self, verb: str, names: Iterable[str]) -> str:
        """The command line that runs `verb` on some of them."""
        words = [word for name in names for word in ("--host", name)]
        return shlex.join(["ddtree-overlay", verb, *words, *self.others])


def find_targets(
    app: App,
    *,
    host: Sequence[str] = (),
    group: Sequence[str] = (),
    root: Path | None = None,
    release: str | None = None,
    python: str | None = None,
    url: str | None = None,
    allowed: Sequence[str] = (),
) -> Target | Fleet:
    """The one target, or the fleet, that the options name. A group is a fleet even if it has one host only.

    Raises:
        UsageError: None or several kinds are named, or an option does not belong to the one that is.
    """
    names = list(dict.fromkeys(host))
    if not group and len(names) <= 1:
        first = names[0] if names else None
        return find_target(app, host=first, root=root, release=release, python=python, url=url, allowed=allowed)
    given = (("--release", release), ("--root", root), ("--url", url))
    others = [name for name, value in given if value is not None]
    if others:
        several = "--group" if group else "--host"
        raise UsageError(f"{several} and {' and '.join(others)} exclude each other", next_step=f"leave {others[0]} out")
    deploy = app.deploy()
    names = list(dict.fromkeys([*names, *(name for g in group for name in deploy.group(g))]))
    words = [
        *(word for name in dict.fromkeys(group) for word in ("--group", name)),
        *(word for name in dict.fromkeys(host) for word in ("--host", name)),
    ]
    rest = (*option_words("--python", python), *app.flags)
    label = group[0] if len(set(group)) == 1 and not host else listed(names, 3)
    targets = tuple(find_target(app, host=name, python=python) for name in names)
    return Fleet(label, shlex.join([*words, *rest]), targets, rest)


def find_target(
    app: App,
    *,
    host: str | None = None,
    root: Path | None = None,
    release: str | None = None,
    python: str | None = None,
    url: str | None = None,
    allowed: Sequence[str] = (),
) -> Target:
    """The one target that the options name; `allowed` are the options that the verb has.

    Raises:
        UsageError: None or several are named, or an option does not belong to the one that is.
    """
    every = (("--host", host), ("--release", release), ("--root", root), ("--url", url))
    given = [name for name, value in every if value is not None]
    if len(given) != 1:
        *known, last = [f"{name} {word}" for name, word in _WORDS.items() if name in allowed]
        raise UsageError(
            f"{' and '.join(given)} exclude each other" if given else "no target was named",
            next_step=f"name exactly one of {', '.join(known)} or {last}",
        )
    if url is not None:
        return _server_target(app, url)
    if host is not None:
        found = app.deploy().host(host)
        flag = shlex.join(["--host", host, *option_words("--python", python), *app.flags])
        return Target(host, flag, _adjusted(found, app, python))
    if root is not None:
        return _root_target(app, root, python)
    if python is not None:
        raise UsageError("--python does not go with --release", next_step="leave --python out")
    from ddtree_overlay.snapshots import check_release_name

    assert release is not None
    check_release_name(release)
    return Target(f"sglang-{release}", shlex.join(["--release", release, *app.flags]), release=release)


def _server_target(app: App, url: str) -> Target:
    wrong = problem("url", url)
    if wrong:
        shown = "--url" if "@" in url else f"--url {url}"  # what stands before an @ may be a password
        raise UsageError(f"{shown}: it {wrong}", next_step="name it as http://ADDRESS:PORT")
    return Target(urlsplit(url).netloc, shlex.join(["--url", url, *app.flags]), url=url.rstrip("/"))


def option_words(name: str, value: object) -> list[str]:
    """An option as it would be typed; nothing for one that was not given."""
    return [] if value is None else [name, str(value)]


def _root_target(app: App, root: Path, python: str | None) -> Target:
    if not root.is_dir():
        raise UsageError(
            f"--root {root}: no such folder", next_step="name the folder that holds sglang, or sglang itself"
        )
    where = root.resolve()
    # Most of these folders are called sglang: the digest of the whole path keeps their snapshots apart.
    name = f"root-{where.name}-{sha256(os.fsencode(where))[:6]}"
    place = Host(name, "localhost", transport="local", root=str(where), python=python or sys.executable)
    flag = shlex.join(["--root", str(root), *option_words("--python", python), *app.flags])
    return Target(place.name, flag, _adjusted(place, app, None))


def _adjusted(host: Host, app: App, python: str | None) -> Host:
    return replace(host, timeout=app.timeout or host.timeout, python=python or host.python)
