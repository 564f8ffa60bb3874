# SPDX-License-Identifier: Apache-2.0
"""The bytes of one agent call: what is sent, and how the answer is found in what comes back. No I/O."""

from __future__ import annotations

import functools
import json
import logging
import re
import secrets
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from ddtree_overlay import errors
from ddtree_overlay.manifest import sha256


#: Runs the first part of stdin, under any Python: an old one must be able to say so. `-c` puts the current folder, at
#: first the login's home, on the path: it goes before anything is imported that a file there could stand for. One line
#: without single quotes, `$` and `!`, so that every login shell passes it on unchanged.
BOOTSTRAP = (
    'import sys;sys.path[:1]==[""] and sys.path.pop(0);'
    'sys.version_info<(3,9) and sys.exit("ddtree: Python "+sys.version.split()[0]+" is too old");'
    "exec(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())))"
)

#: Operations that change the host; once started they finish there, or put everything back, whatever becomes of us.
MUTATING = frozenset({"push", "rollback", "prove", "settle", "confirm"})

#: Modules that only run on this side, or in an export.
_NOT_SENT = ("options", "remarks", "standalone")

_SET_PYTHON = "set `python` in deploy.toml to the interpreter that starts the server (and `exec_prefix`, if you use it)"
#: sudo's words for "I would have to ask": with -n, without a terminal, and with `requiretty`.
_SUDO_REFUSED = re.compile(
    rb"sudo: .*(?:password is required|terminal is required|must have a tty|no tty present|no askpass program)"
)

_KINDS: Mapping[str, type[errors.OverlayError]] = {
    "failed": errors.OverlayError,
    "interpreter": errors.OverlayError,
    "conflict": errors.ConflictError,
    "locked": errors.LockedError,
    "rolled-back": errors.RolledBackError,
    "incomplete": errors.RollbackIncompleteError,
    "connection": errors.ConnectionFailedError,
}


@dataclass(frozen=True, slots=True)
class Reply:
    """What the agent answered."""

    result: dict[str, Any]
    payload: bytes


@dataclass(frozen=True, slots=True)
class Output:
    """What one run of the interpreter left: `code` is None when it is not known, negative for a signal."""

    stdout: bytes
    stderr: bytes
    code: int | None


def new_sentinel() -> str:
    """A line mark that no rc file prints by chance."""
    return f"ddtree-{secrets.token_hex(16)}"


def pack(files: Mapping[str, bytes]) -> tuple[list[dict[str, Any]], bytes]:
    """`files` as the `files` argument and the payload of the operations `compile` and `probe`."""
    return [{"path": p, "size": len(d)} for p, d in files.items()], b"".join(files.values())


def encode(op: str, args: Mapping[str, Any], payload: bytes, timeout: float = 60.0) -> bytes:
    """Everything that goes to the interpreter's stdin: loader, modules, request, payload.

    `timeout` is how long this side waits for a sign of life: the agent has to show several within it.
    """
    loader, modules = _agent_source()
    call = {"op": op, "args": dict(args), "payload_sha256": sha256(payload), "timeout": timeout}
    request = json.dumps(call).encode()
    return b"".join(b"%d\n%s" % (len(part), part) for part in (loader, modules, request, payload))


@functools.cache
def _agent_source() -> tuple[bytes, bytes]:
    folder = resources.files("ddtree_overlay") / "remote"
    sources = {f.name[:-3]: f.read_text("utf-8") for f in folder.iterdir() if f.name.endswith(".py")}
    loader = sources.pop("loader")
    for name in _NOT_SENT:
        del sources[name]
    return loader.encode(), json.dumps(sources, sort_keys=True).encode()


def decode(output: Output, sentinel: str) -> tuple[dict[str, Any], bytes] | None:
    """The agent's answer and its payload, or None when there is no whole answer in the output.

    Anything before the frame (a noisy rc file, heartbeats) and after it is passed over.
    """
    _, mark, rest = output.stdout.partition(f"\n{sentinel}:".encode())
    sizes, feed, data = rest.partition(b"\n")
    if not mark or not feed:
        return None
    body, payload = (int(n) for n in sizes.split(b":"))
    if len(data) < body + payload:
        return None
    return json.loads(data[:body]), data[body : body + payload]


def complete(stdout: bytearray, sentinel: str) -> bool:
    """Whether the whole answer is there: whatever still holds the stream open has nothing to add."""
    at = stdout.find(f"\n{sentinel}:".encode())
    feed = stdout.find(b"\n", at + 1) if at >= 0 else -1
    if feed < 0:
        return False
    body, payload = (int(n) for n in stdout[at + 1 : feed].split(b":")[1:])
    return len(stdout) - feed - 1 >= body + payload


def noise(output: Output, sentinel: str) -> str:
    """What was printed before the frame, heartbeats and lines about the progress taken off."""
    text = output.stdout.partition(f"\n{sentinel}:".encode())[0].decode("utf-8", "replace")
    return "\n".join(line for line in text.splitlines() if not line.startswith(f"{sentinel}~")).strip()


class Progress:
    """Tells each line that the agent sends about a long operation, as soon as it is whole."""

    def __init__(self, sentinel: str, tell: Callable[[str], None]) -> None:
        self._mark = f"\n{sentinel}~".encode()
        self._tell = tell
        self._at = 0

    def __call__(self, stdout: bytearray) -> None:
        """Look at what has arrived so far."""
        while (start := stdout.find(self._mark, self._at)) >= 0:
            start += len(self._mark)
            end = stdout.find(b"\n", start)
            if end < 0:
                return
            self._at = end
            self._tell(stdout[start:end].decode("utf-8", "replace"))


def unwrap(answer: Mapping[str, Any], payload: bytes, target: str) -> Reply:
    """The reply, or the agent's refusal as the matching error; `{target}` in its next step is filled in.

    Raises:
        OverlayError: The agent refused or failed.
    """
    if answer["ok"]:
        return Reply(answer["result"], payload)
    raise refusal(answer["error"], target)


def refusal(error: Mapping[str, str], target: str) -> errors.OverlayError:
    """The error class and texts of one refusal of the agent; the traceback of a fault goes to the log (`-vv`)."""
    if "trace" in error:
        logging.getLogger(__name__).debug("%s", error["trace"])
    step = _as_given(error["next"].replace("{target}", target), target)
    return _KINDS.get(error["kind"], errors.OverlayError)(error["what"], why=error["why"], next_step=step)


def _as_given(step: str, target: str) -> str:
    """A step that asks for another interpreter, for a `target` whose interpreter is not that of deploy.toml."""
    given = {"--python", "--root"}.intersection(shlex.split(target))
    return step.replace("set `python` in deploy.toml to", "name with --python") if given else step


#: What becomes of a change whose answer never came.
FATE = "the change may still finish there; one that was interrupted is put back by the next push or rollback"


def missing_answer(
    output: Output, sentinel: str, command: str, name: str, target: str, *, changes: bool = False
) -> errors.OverlayError:
    """Why there is no answer, from the exit status and what was printed."""
    said = _tail(output.stderr) or _tail(noise(output, sentinel).encode())
    if f"\n{sentinel}:".encode() in output.stdout:
        return errors.ConnectionFailedError(
            f"the answer from {name} was cut short",
            why=f"{len(output.stdout)} bytes arrived; an answer counts only when it is whole",
            next_step="run the same command again",
        )
    if _SUDO_REFUSED.search(output.stderr):
        return _sudo_refused(command, name, said)
    if output.code in (126, 127):
        return cannot_start(command, name, target, said)
    if output.code is None or output.code < 0:
        return errors.ConnectionFailedError(
            f"no answer from {name}: terminated by a signal or the connection was lost",
            why="; ".join(filter(None, [said, FATE if changes else ""])),
            next_step=f"ddtree-overlay status {target}",
        )
    return _not_python(output, command, name, target, said)


def _not_python(output: Output, command: str, name: str, target: str, said: str) -> errors.OverlayError:
    if b"ddtree: Python " in output.stderr:
        why = said.rpartition("ddtree: ")[2]
        what = f"{command} on {name} is too old: Python 3.9 or newer is needed"
        return errors.OverlayError(what, why=why, next_step=_as_given(_SET_PYTHON, target))
    if b"int() with base 10: b''" in output.stderr:
        return errors.OverlayError(
            f"{command} on {name} does not pass its standard input on",
            why=said,
            next_step="let `exec_prefix` in deploy.toml keep stdin open: `docker exec -i`, `kubectl exec -i`",
        )
    if b"EOFError" in output.stderr or b"SyntaxError" in output.stderr:
        why = f"the request was cut short on its way: {said}"
        return errors.ConnectionFailedError(
            f"no answer from {name}", why=why, next_step=f"ddtree-overlay status {target}"
        )
    why = f"exit status {output.code}, no answer; it said: {said or 'nothing'}"
    what = f"{command} on {name} does not behave like a Python interpreter"
    return errors.OverlayError(what, why=why, next_step=_as_given(_SET_PYTHON, target))


def cannot_start(command: str, name: str, target: str, why: str) -> errors.OverlayError:
    """The error of an interpreter, or of the `exec_prefix` before it, that is not there or may not be run."""
    what = f"the interpreter {command} cannot be started on {name}"
    return errors.OverlayError(what, why=why, next_step=_as_given(_SET_PYTHON, target))


def _sudo_refused(command: str, name: str, said: str) -> errors.OverlayError:
    return errors.OverlayError(
        f"sudo on {name} asks for a password or a terminal, and there is nobody to answer: {command}",
        why=said,
        next_step=f"on {name}: allow this command without a password (NOPASSWD, !requiretty) with visudo, "
        "and write `sudo -n` in exec_prefix",
    )


def _tail(data: bytes) -> str:
    return " / ".join(data.decode("utf-8", "replace").strip().splitlines()[-3:])[-500:]
