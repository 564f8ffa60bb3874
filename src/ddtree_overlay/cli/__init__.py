# SPDX-License-Identifier: Apache-2.0
"""The command line: each verb parses, calls the core, and hands lines and JSON to `render`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from ddtree_overlay import __version__
from ddtree_overlay.cli.bundles import diff, patch, verify
from ddtree_overlay.cli.deploying import push, rollback
from ddtree_overlay.cli.exporting import export
from ddtree_overlay.cli.inspecting import doctor, history, status
from ddtree_overlay.cli.options import CancelledError
from ddtree_overlay.cli.proving import confirm
from ddtree_overlay.cli.snapshotting import snapshot
from ddtree_overlay.cli.tuning import tune
from ddtree_overlay.errors import EXIT_CODES, OverlayError, UsageError
from ddtree_overlay.render import Screen, silence


PROGRAM = "ddtree-overlay"
_EXIT_CODES = "\n".join(f"  {code:>3}  {meaning}" for code, meaning in EXIT_CODES.items())


class Cli(click.Group):
    """The group of verbs. Its `main` turns every way a command can end into the documented exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  click's signature
        """The verbs in the order of work."""
        return list(self.commands)

    def main(  # type: ignore[override]  # click's second overload may return; ours never does
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,  # noqa: ARG002  the name is always ours
        **extra: Any,
    ) -> NoReturn:
        """Run and exit: errors as what, why and next step on stderr, and as JSON on stdout with `--json`."""
        _open_missing_streams()
        words = list(sys.argv[1:] if args is None else args)
        extra["standalone_mode"] = False
        code = self._run(words, extra)
        for stream in filter(None, (sys.stdout, sys.stderr)):
            try:
                stream.flush()
            except (OSError, ValueError):
                silence(stream)
        sys.exit(code)

    def _run(self, words: list[str], extra: dict[str, Any]) -> int:
        verb = next((word for word in words if word in cli.commands), None)
        screen = Screen(json="--json" in words, command=verb)
        try:
            result = super().main(words, PROGRAM, **extra)
            return result if isinstance(result, int) else 0
        except OverlayError as e:
            screen.fail(e)
            return e.exit_code
        except click.exceptions.NoArgsIsHelpError as e:
            click.echo(e.format_message())
            return UsageError.exit_code
        except click.ClickException as e:
            screen.fail(_refused(e, words))
            return UsageError.exit_code
        except (click.Abort, KeyboardInterrupt):
            screen.fail(CancelledError("interrupted"))
            return CancelledError.exit_code
        except SystemExit:
            # click leaves this way when the reader of a help text or a version has gone; nothing failed.
            silence(sys.stdout)
            return 0


def _refused(e: click.ClickException, words: list[str]) -> UsageError:
    """What click refuses, in our words; an option of the verbs that stands before the verb is told where it belongs."""
    command = e.ctx.command_path if isinstance(e, click.UsageError) and e.ctx else PROGRAM
    if isinstance(e, click.NoSuchOption) and command == PROGRAM:
        option = e.option_name
        verb = next((word for word in words if word in cli.commands), "VERB")
        if any(option in p.opts for known in cli.commands.values() for p in known.params):
            return UsageError(f"{option} stands before the verb", next_step=f"{PROGRAM} {verb} {option} …")
    text = e.format_message().rstrip(".")
    if isinstance(e, click.MissingParameter):  # click puts each choice on a line of its own, behind a tab
        text = " ".join(text.split())
    return UsageError(text, next_step=f"{command} --help")


def _open_missing_streams() -> None:
    """Give a closed stdin, stdout or stderr (`>&-`) a place in the file table.

    Otherwise the next file or socket that is opened gets its number, and a child process would write into it.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


@click.group(
    cls=Cli,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog=f"\b\nExit codes:\n{_EXIT_CODES}",
)
@click.version_option(__version__, package_name=None, prog_name=PROGRAM)
def cli() -> None:
    """Add DDTree speculative decoding to an installed SGLang, over SSH, and take it away again.

    \b
    Example, in this order:
      ddtree-overlay snapshot --host ct200     what is installed there
      ddtree-overlay patch --host ct200        build the patched files for it
      ddtree-overlay verify --host ct200       prove that they hold
      ddtree-overlay diff --host ct200         read what would change
      ddtree-overlay push --host ct200         change it
      ddtree-overlay tune --host ct200         see which budget fits, once it serves
      ddtree-overlay rollback --host ct200     take it away again
    """


for _verb in (snapshot, patch, verify, diff, push, rollback, confirm, status, history, doctor, export, tune):
    cli.add_command(_verb)


def main() -> NoReturn:
    """Entry point of the `ddtree-overlay` command."""
    cli.main()
