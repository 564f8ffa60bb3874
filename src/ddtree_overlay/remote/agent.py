# SPDX-License-Identifier: Apache-2.0
"""The operations by name, and the frame that their answers travel in."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
import threading
import traceback
from importlib import import_module
from typing import Any, Callable

from .common import Refusal
from .telling import open_line


Answer = tuple[dict[str, Any], bytes]
Operation = Callable[[dict[str, Any], bytes], Answer]

#: Operation -> the module and the function that carry it out; only what a call needs is compiled and imported.
OPERATIONS: dict[str, tuple[str, str]] = {
    "facts": ("facts", "facts"),
    "snapshot": ("reading", "snapshot"),
    "fetch": ("reading", "fetch"),
    "compile": ("probe", "compile_files"),
    "probe": ("probe", "probe"),
    "plan_push": ("pushing", "plan_push"),
    "survey": ("staging", "survey"),
    "stage": ("staging", "stage"),
    "unstage": ("staging", "unstage"),
    "push": ("pushing", "push"),
    "plan_rollback": ("rolling", "plan_rollback"),
    "rollback": ("rolling", "rollback"),
    "status": ("reporting", "status"),
    "history": ("reporting", "history"),
    "rehearse": ("trials", "rehearse"),
    "prove": ("trials", "prove"),
    "settle": ("states", "settle"),
    "confirm": ("states", "confirm"),
}
#: These finish, or put everything back, even when the connection is gone.
MUTATING = frozenset({"push", "rollback", "prove", "settle", "confirm"})
#: The longest silence of a healthy agent; against a shorter patience on the other side it shows three signs in it.
HEARTBEAT_SECONDS = 5.0


def serve(call: dict[str, Any], payload: bytes, sentinel: str) -> None:
    """Run one operation and write its answer to stdout."""
    out = shield(changes=call["op"] in MUTATING)
    open_line(out, f"\n{sentinel}~", b"\n")
    done = threading.Event()
    seconds = min(HEARTBEAT_SECONDS, call["timeout"] / 3)
    beat = threading.Thread(target=_beat, args=(out, done, seconds, call["op"] in MUTATING), daemon=True)
    beat.start()
    found, data = answer(call, payload)
    done.set()
    beat.join()
    body = json.dumps(found).encode("ascii")
    with contextlib.suppress(OSError):
        _write(out, f"\n{sentinel}:{len(body)}:{len(data)}\n".encode("ascii") + body + data)
    sys.stderr.flush()


def shield(*, changes: bool) -> int:
    """Make this process fit to run operations; gives the descriptor that the answer goes to."""
    out = os.dup(1)
    # Whatever an imported module prints must not get into the answer.
    os.dup2(2, 1)
    os.chdir("/")
    if changes:
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    else:
        # Whoever started us may have had it ignored; `_beat` needs it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return out


def answer(call: dict[str, Any], payload: bytes) -> Answer:
    """The result of one operation, or its refusal; a fault is one as well."""
    try:
        result, data = _operation(call["op"])(call["args"], payload)
        return {"ok": True, "result": result}, data
    except Refusal as refusal:
        return {"ok": False, "error": refusal.as_dict()}, b""
    except OSError as e:
        return {"ok": False, "error": _system_error(e, call["op"]).as_dict()}, b""
    except Exception as e:
        return {"ok": False, "error": {**_fault(e).as_dict(), "trace": traceback.format_exc()}}, b""


def _fault(e: Exception) -> Refusal:
    """What nobody foresaw, in one line each; the traceback travels beside it, for who asks for everything."""
    at = traceback.extract_tb(e.__traceback__)[-1]
    return Refusal(
        "failed",
        f"fault in the agent: {type(e).__name__}: {' '.join(str(e).split())[:300]}",
        why=f"in {at.name}, {at.filename} line {at.lineno}",
        next_step="ddtree-overlay status {target}; run the command again with -vv and report what it prints",
    )


def _operation(name: str) -> Operation:
    if name not in OPERATIONS:
        raise Refusal("failed", f"the agent has no operation {name!r}")
    module, function = OPERATIONS[name]
    found: Operation = getattr(import_module(f".{module}", __package__), function)
    return found


def _system_error(e: OSError, operation: str) -> Refusal:
    where = f"{e.filename}: " if e.filename else ""
    step = (
        "free some space on that file system"
        if e.errno in (errno.ENOSPC, errno.EDQUOT)
        else "ddtree-overlay doctor {target}"
    )
    return Refusal("failed", f"{operation} failed on the host: {where}{e.strerror or e}", next_step=step)


def _beat(out: int, done: threading.Event, seconds: float, mutating: bool) -> None:
    """Show the other side that a long operation is alive: line feeds before the frame mean nothing.

    An operation that only reads ends when nobody is there any more to read its answer.
    """
    while not done.wait(seconds):
        try:
            _write(out, b"\n")
        except OSError:
            if not mutating:
                _end(done)
            return


def _end(done: threading.Event) -> None:
    """Interrupt the operation, so that it removes what it has made; end the process if that does not help."""
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)
    # A probe first waits for its own processes, which have a time limit.
    if not done.wait(600):
        os._exit(1)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
