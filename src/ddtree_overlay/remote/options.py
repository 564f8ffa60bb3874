# SPDX-License-Identifier: Apache-2.0
"""The command line of `apply.py`, and the restart that it asks for."""

from __future__ import annotations

import re
import shlex
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from typing import Any, NoReturn


_ABOUT = "Put the overlay of this folder into the SGLang that this interpreter imports, or take it away again."
_HELP = {
    "push": "put the overlay in place",
    "rollback": "take it off again, or go back to an earlier one",
    "confirm": "say that the live deployment serves well",
    "status": "say what is deployed here",
    "history": "list every deployment here",
}
_CODES = (
    "Exit codes: 0 done or nothing to do, 1 failed and nothing changed, 2 bad arguments, 4 conflict, 5 locked, "
    "6 failed and put back, 7 failed and not put back completely."
)
_DAY = 86400


class _Parser(ArgumentParser):
    """A parser whose refusals say what the next step is."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n  next: see {self.prog} --help\n")


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds <= _DAY:
        raise ArgumentTypeError(f"{text} is not between 0 and {_DAY} seconds")
    return seconds


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as e:
        raise ArgumentTypeError(f"{e}: {text}") from e


def _url(text: str) -> str:
    if not re.match(r"https?://[^/\s]+(/\S*)?\Z", text):
        raise ArgumentTypeError(f"{text!r} is no address such as http://127.0.0.1:30000")
    return text


def read_options(words: list[str]) -> Namespace:
    """The options in `words`; exits with 2 when they make no sense."""
    parser = _Parser(prog="apply.py", description=_ABOUT, epilog=_CODES)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=_Parser)
    for name, text in _HELP.items():
        verb = verbs.add_parser(name, help=text, description=text, epilog=_CODES)
        verb.add_argument("--root", metavar="PATH", help="work on this package folder, whatever Python imports")
        verb.set_defaults(dry_run=False)
        if name in ("push", "rollback", "confirm"):
            verb.add_argument("--operator", metavar="NAME", default="", help="who does this, for the history")
            verb.add_argument("--lock-wait", type=_seconds, default=0.0, metavar="SECONDS", help="wait for another run")
            _add_server(verb, restart=name != "confirm")
    push, rollback, confirm = (verbs.choices[n] for n in ("push", "rollback", "confirm"))
    for verb in (push, rollback):
        verb.add_argument("--dry-run", action="store_true", help="plan only")
    where = rollback.add_mutually_exclusive_group()
    where.add_argument("--to", metavar="ID", help="go back to this deployment, or to `base`; default: one back")
    where.add_argument("--purge", action="store_true", help="go back to the base; remove backups and history")
    rollback.add_argument("--undo", metavar="ID", help="refuse if another deployment is live by now")
    confirm.add_argument("--note", metavar="TEXT", default="", help="what the history shall say about it")
    options = parser.parse_args(words)
    if getattr(options, "restart", False) and not (options.url and (options.unit or options.command)):
        verbs.choices[options.verb].error("--restart needs --url, and --unit or --command")
    return options


def _add_server(verb: ArgumentParser, *, restart: bool) -> None:
    verb.add_argument("--url", type=_url, help="where the server listens, such as http://127.0.0.1:30000")
    verb.add_argument("--api-key-file", metavar="FILE", help="a file with the server's API key")
    if not restart:
        return
    verb.add_argument("--restart", action="store_true", help="restart the server, and go back if it does not come up")
    how = verb.add_mutually_exclusive_group()
    how.add_argument("--unit", default=None, help="its systemd unit")
    how.add_argument("--command", type=_words, metavar="LINE", default="", help="the command that restarts it")
    verb.add_argument(
        "--restart-timeout", type=_seconds, default=120.0, metavar="SECONDS", help="for the restart itself"
    )
    verb.add_argument("--timeout", type=_seconds, default=300.0, metavar="SECONDS", help="until the server is up")


def trial_of(options: Namespace) -> dict[str, Any] | None:
    """How the server is restarted and asked, or None when it is left alone."""
    if options.verb == "confirm":
        return {"url": options.url, "api_key_file": options.api_key_file} if options.url else None
    if not options.restart:
        return None
    return {
        "restart": options.command,
        "unit": options.unit,
        "restart_timeout": options.restart_timeout,
        "url": options.url,
        "timeout": options.timeout,
        "api_key_file": options.api_key_file,
    }
