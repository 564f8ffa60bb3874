# SPDX-License-Identifier: Apache-2.0
"""Options that every verb shares, and the `App` and `Target` they are turned into."""

from __future__ import annotations

import inspect
import logging
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from ddtree_overlay.config import MAX_TIMEOUT, Deploy, Host, load_config
from ddtree_overlay.errors import OverlayError, UsageError
from ddtree_overlay.manifest import sha256
from ddtree_overlay.render import OutputLostError, Screen
from ddtree_overlay.reports import Line
from ddtree_overlay.workspace import Workspace


class _Seconds(click.FloatRange):
    """A number of seconds; NaN, which is neither above nor below a limit, is none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        return found if found == found else self.fail(f"{value} is not a number of seconds", param, ctx)  # noqa: PLR0124


_FILE = click.Path(path_type=Path)
_HOST = click.Option(["--host"], metavar="NAME", help="A host of deploy.toml.")
_RELEASE = click.Option(["--release"], metavar="VERSION", help="The published wheel of a release.")
_ROOT = click.Option(["--root"], type=_FILE, metavar="PATH", help="A package folder on this machine.")
_PYTHON = click.Option(["--python"], metavar="PATH", help="The interpreter that imports SGLang there.")
#: What a verb can be pointed at.
INSTALLED = (_HOST, _ROOT, _PYTHON)
ANYTHING = (_HOST, _RELEASE, _ROOT, _PYTHON)

_COMMON = (
    click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON object on stdout."),
    click.Option(["--config"], type=_FILE, metavar="FILE", help="Use this deploy.toml."),
    click.Option(["--workdir"], type=_FILE, metavar="DIR", help="Work as if started in DIR."),
    click.Option(
        ["--timeout"],
        type=_Seconds(0, MAX_TIMEOUT, min_open=True),
        metavar="SECONDS",
        help="Patience with a host.",
    ),
    click.Option(["--accept-new"], is_flag=True, help="Add an unknown host key to known_hosts instead of refusing it."),
    click.Option(
        ["--color"], type=click.Choice(["auto", "always", "never"]), default="auto", help="Colour the output."
    ),
    click.Option(["-q", "--quiet"], is_flag=True, help="Print results, warnings and errors only."),
    click.Option(["-v", "--verbose"], count=True, help="Log to stderr; twice for everything."),
)


class CancelledError(OverlayError):
    """The user pressed Ctrl-C."""

    exit_code = 130


@dataclass(frozen=True, slots=True)
class App:
    """What a verb works with: where to keep things, which hosts there are, and where to print."""

    screen: Screen
    workspace: Workspace
    config: Path | None
    timeout: float | None
    accept_new: bool = False
    #: The options that say where to work, for the commands that messages advise.
    flags: tuple[str, ...] = ()

    def deploy(self) -> Deploy:
        """The configuration: `--config`, else the workspace's `deploy.toml`, else an empty one."""
        return load_config(self.config or self.workspace.config_path)

    def finish(
        self, command: str, value: Mapping[str, Any], lines: Iterable[Line], code: int = 0, *, wrote: bool = False
    ) -> int:
        """Print the result, as lines or as the one JSON object, and give back the exit code.

        `wrote` (or `"changed": True` in `value`) says that the verb has changed something. Then the exit code tells
        what became of that, also when the output is lost: code 1 would say that nothing was changed.

        Raises:
            OutputLostError: Standard output takes nothing, and all that the verb was for is its output.
        """
        try:
            self.screen.show(lines)
            self.screen.emit({"command": command, "ok": code == 0, "exit_code": code, **value})
        except OutputLostError as e:
            if not (wrote or value.get("changed")):
                raise
            self.screen.warn(f"{e.what}; the {command} itself is done, and exit code {code} speaks of that")
        return code


def verb(*, targets: Sequence[click.Option], example: str) -> Callable[[Callable[..., int]], click.Command]:
    """Make a command of a function of an `App`, a `Target` and its own options, which returns the exit code.

    The command has the options of `targets`, then its own, then the common ones; errors are printed for it.
    """

    def decorate(function: Callable[..., int]) -> click.Command:
        def callback(**given: Any) -> int:
            screen = Screen(
                json=given.pop("as_json"),
                color=given.pop("color"),
                verbosity=-1 if given.pop("quiet") else given["verbose"],
            )
            del given["verbose"]
            _log_to_stderr(screen.verbosity)
            named = {str(o.name): given.pop(str(o.name)) for o in targets}
            target = None
            try:
                patience, accept_new = given.pop("timeout"), given.pop("accept_new")
                config, workdir = given.pop("config"), given.pop("workdir")
                flags = (*_option("--config", config), *_option("--workdir", workdir))
                app = App(screen, Workspace.find(workdir), config, patience, accept_new, flags)
                target = find_target(app, release_allowed=_RELEASE in targets, **named)
                return function(app, target, **given)
            except OverlayError as e:
                if target is not None:
                    e.next_step = e.next_step.replace("{target}", target.flag)
                screen.fail(e)
                return e.exit_code
            except OSError as e:
                what = f"{e.filename}: {e.strerror}" if e.filename else str(e)
                fault = OverlayError(
                    what, next_step="check permissions and free space on this machine, then run it again"
                )
                screen.fail(fault)
                return fault.exit_code
            except (click.ClickException, click.Abort, click.exceptions.Exit):
                raise
            except Exception as e:
                return _report_fault(screen, e)

        own = list(reversed(getattr(function, "__click_params__", [])))
        return click.Command(
            function.__name__,
            callback=callback,
            params=[*targets, *own, *_COMMON],
            help=inspect.cleandoc(function.__doc__ or ""),
            epilog=f"\b\nExample:\n  {example}",
        )

    return decorate


def _report_fault(screen: Screen, e: Exception) -> int:
    """Print what nobody foresaw as an error like any other; the traceback is for who asks for everything."""
    screen.trace()
    fault = OverlayError(
        f"fault in ddtree-overlay: {type(e).__name__}: {e}", next_step="run it again with -vv and report what it prints"
    )
    screen.fail(fault)
    return fault.exit_code


def _log_to_stderr(verbosity: int) -> None:
    level = {-1: logging.ERROR, 0: logging.WARNING, 1: logging.INFO}.get(verbosity, logging.DEBUG)
    logging.basicConfig(stream=sys.stderr, level=level, format="%(levelname)s: %(message)s", force=True)
    # paramiko logs every fault that it also raises; ours are raised with a next step.
    logging.getLogger("paramiko").setLevel(logging.DEBUG if verbosity > 1 else logging.CRITICAL)


@dataclass(frozen=True, slots=True)
class Target:
    """One installed or published SGLang: a host, a package folder, or a release. `name` is its snapshot's name."""

    name: str
    flag: str
    host: Host | None = None
    release: str | None = None

    def command(self, verb: str) -> str:
        """The command line that runs `verb` on this target."""
        return f"ddtree-overlay {verb} {self.flag}"

    @property
    def place(self) -> Host:
        """The host or folder; only for verbs that take no `--release`."""
        assert self.host is not None
        return self.host


def find_target(
    app: App,
    *,
    host: str | None = None,
    root: Path | None = None,
    release: str | None = None,
    python: str | None = None,
    release_allowed: bool = False,
) -> Target:
    """The one target that the options name.

    Raises:
        UsageError: None or several are named, or an option does not belong to the one that is.
    """
    given = [name for name, value in (("--host", host), ("--release", release), ("--root", root)) if value is not None]
    if len(given) != 1:
        known = "--host NAME, --release VERSION or --root PATH" if release_allowed else "--host NAME or --root PATH"
        raise UsageError(
            f"{' and '.join(given)} exclude each other" if given else "no target was named",
            next_step=f"name exactly one of {known}",
        )
    if host is not None:
        found = app.deploy().host(host)
        flag = shlex.join(["--host", host, *_option("--python", python), *app.flags])
        return Target(host, flag, _adjusted(found, app, python))
    if root is not None:
        return _root_target(app, root, python)
    if python is not None:
        raise UsageError("--python does not go with --release", next_step="leave --python out")
    from ddtree_overlay.snapshots import check_release_name

    assert release is not None
    check_release_name(release)
    return Target(f"sglang-{release}", shlex.join(["--release", release, *app.flags]), release=release)


def _option(name: str, value: object) -> list[str]:
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
    flag = shlex.join(["--root", str(root), *_option("--python", python), *app.flags])
    return Target(place.name, flag, _adjusted(place, app, None))


def _adjusted(host: Host, app: App, python: str | None) -> Host:
    return replace(host, timeout=app.timeout or host.timeout, python=python or host.python)
