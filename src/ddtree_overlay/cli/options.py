# SPDX-License-Identifier: Apache-2.0
"""Options that every verb shares, the `App` they are turned into, and how a verb becomes a command."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from ddtree_overlay.cli.selecting import Fleet, Target, find_targets, option_words
from ddtree_overlay.config import Deploy, load_config
from ddtree_overlay.config_keys import MAX_TIMEOUT
from ddtree_overlay.errors import OverlayError, UsageError
from ddtree_overlay.render import OutputLostError, Screen
from ddtree_overlay.reports import Line
from ddtree_overlay.workspace import Workspace


class Seconds(click.FloatRange):
    """A number of seconds; NaN, which is neither above nor below a limit, is none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """As click asks for it."""
        found = super().convert(value, param, ctx)
        return found if found == found else self.fail(f"{value} is not a number of seconds", param, ctx)  # noqa: PLR0124


_FILE = click.Path(path_type=Path)
_HOST = click.Option(["--host"], multiple=True, metavar="NAME", help="A host of deploy.toml; can be repeated.")
_GROUP = click.Option(["--group"], multiple=True, metavar="NAME", help="The hosts of a group of deploy.toml.")
_RELEASE = click.Option(["--release"], metavar="VERSION", help="The published wheel of a release.")
_ROOT = click.Option(["--root"], type=_FILE, metavar="PATH", help="A package folder on this machine.")
_PYTHON = click.Option(["--python"], metavar="PATH", help="The interpreter that imports SGLang there.")
_SERVER = click.Option(["--host"], multiple=True, metavar="NAME", help="The server of a host of deploy.toml.")
_URL = click.Option(["--url"], metavar="URL", help="Where a server listens, as seen from here.")
#: What a verb can be pointed at.
INSTALLED = (_HOST, _GROUP, _ROOT, _PYTHON)
ANYTHING = (_HOST, _GROUP, _RELEASE, _ROOT, _PYTHON)
SERVED = (_SERVER, _URL)

_COMMON = (
    click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON object on stdout."),
    click.Option(["--config"], type=_FILE, metavar="FILE", help="Use this deploy.toml."),
    click.Option(["--workdir"], type=_FILE, metavar="DIR", help="Work as if started in DIR."),
    click.Option(
        ["--timeout"],
        type=Seconds(0, MAX_TIMEOUT, min_open=True),
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


def verb(
    *,
    targets: Sequence[click.Option],
    example: str,
    fleet: Callable[..., int] | None = None,
    fleet_options: Sequence[click.Option] = (),
) -> Callable[[Callable[..., int]], click.Command]:
    """Make a command of a function of an `App`, a `Target` and its own options, which returns the exit code.

    The command has the options of `targets`, then its own, then `fleet_options`, then the common ones; errors are
    printed for it. Several hosts are passed to `fleet`, a function of an `App`, a `Fleet` and all of these options;
    without one, the hosts are taken one after the other.
    """

    def decorate(function: Callable[..., int]) -> click.Command:
        def callback(**given: Any) -> int:
            screen = Screen(
                json=given.pop("as_json"),
                color=given.pop("color"),
                verbosity=-1 if given.pop("quiet") else given["verbose"],
                command=function.__name__,
            )
            del given["verbose"]
            _log_to_stderr(screen.verbosity)
            named = {str(o.name): given.pop(str(o.name)) for o in targets}

            def work() -> int:
                patience, accept_new = given.pop("timeout"), given.pop("accept_new")
                config, workdir = given.pop("config"), given.pop("workdir")
                flags = (*option_words("--config", config), *option_words("--workdir", workdir))
                app = App(screen, Workspace.find(workdir), config, patience, accept_new, flags)
                found = find_targets(app, allowed=[o.opts[0] for o in targets], **named)
                if isinstance(found, Fleet):
                    return _on_target(fleet or functools.partial(_one_by_one, function), app, found, given)
                for option in fleet_options:
                    _refuse_alone(option, given.pop(str(option.name)))
                return _on_target(function, app, found, given)

            return _guarded(screen, work)

        own = list(reversed(getattr(function, "__click_params__", [])))
        return click.Command(
            function.__name__,
            callback=callback,
            params=[*targets, *own, *fleet_options, *_COMMON],
            help=inspect.cleandoc(function.__doc__ or ""),
            epilog=f"\b\nExample:\n  {example}",
        )

    return decorate


def _guarded(screen: Screen, work: Callable[[], int]) -> int:
    """Run `work` and print what it raises; gives the exit code."""
    try:
        return work()
    except OverlayError as e:
        screen.fail(e)
        return e.exit_code
    except OSError as e:
        what = f"{e.filename}: {e.strerror}" if e.filename else str(e)
        fault = OverlayError(what, next_step="check permissions and free space on this machine, then run it again")
        screen.fail(fault)
        return fault.exit_code
    except (click.ClickException, click.Abort, click.exceptions.Exit):
        raise
    except Exception as e:
        return _report_fault(screen, e)


def _on_target(function: Callable[..., int], app: App, target: Target | Fleet, given: Mapping[str, Any]) -> int:
    """Run a verb on its target; what it advises names the target as the user did."""
    try:
        return function(app, target, **given)
    except OverlayError as e:
        e.next_step = e.next_step.replace("{target}", target.flag)
        raise


def _refuse_alone(option: click.Option, value: Any) -> None:
    """Refuse an option that says nothing about a single host; a bound on the number of hosts holds for one as well."""
    if option.default is None and value is not None:
        raise UsageError(
            f"{option.opts[0]} is for several hosts",
            next_step=f"leave {option.opts[0]} out, or name the hosts with --group NAME or several --host",
        )


def _one_by_one(function: Callable[..., int], app: App, fleet: Fleet, **given: Any) -> int:
    """Run a verb for one host after the other; a host that fails does not hide the next ones."""
    from ddtree_overlay.fleet import worst

    codes, values = [], []
    for target in fleet.targets:
        part = app.screen.part()
        own = replace(app, screen=part)
        codes.append(_guarded(part, functools.partial(_on_target, function, own, target, given)))
        values.append({"host": target.name, **part.emitted})
    return app.finish(function.__name__, {"hosts": values}, [], worst(codes))


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
