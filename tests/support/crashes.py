# SPDX-License-Identifier: Apache-2.0
"""Operations of the agent in a forked process that is killed with SIGKILL at a given step.

A *step* is one change that the process is about to ask of the kernel. The interpreter's own audit events report every
rename, removal, new folder, opened file and changed attribute, whoever calls it; fsync and the two halves of a write,
for which there are no such events, are wrapped. So no step is left out because nobody thought of it.
"""

from __future__ import annotations

import builtins
import io
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from ddtree_overlay.config import Host
from ddtree_overlay.hosts import protocol
from ddtree_overlay.remote import agent


Work = Callable[[], object]
#: What a step does, to which path where it is known, and the other path of a rename.
Step = tuple[str, str, str]
#: Called before each step with its number, counted from 1.
Observer = Callable[[int, Step], None]

_EVENTS = {
    *("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.chown", "os.utime"),
    *("os.setxattr", "os.removexattr", "os.truncate", "fcntl.flock"),
}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Direct:
    """A transport to the agent's modules in this very process: nothing is started, so thousands of calls are cheap."""

    def __init__(self, root: str, name: str = "here") -> None:
        self.root = root
        self.name = name
        self.target = f"--root {root}"
        self.warnings: list[str] = []
        self.host = Host(name=name, address=name, root=root)
        #: The last call that changes files: operation, arguments, payload.
        self.last: tuple[str, dict[str, Any], bytes] = ("", {}, b"")

    def call(self, op: str, args: Mapping[str, Any], payload: bytes = b"", **_: object) -> protocol.Reply:
        """As every transport; nobody waits, and nobody is told anything."""
        full = json.loads(json.dumps({**args, "root": self.root}))
        if op in agent.MUTATING:
            self.last = (op, full, payload)
        answer, data = agent.answer({"op": op, "args": full}, payload)
        return protocol.unwrap(json.loads(json.dumps(answer)), data, self.target)

    def close(self) -> None:
        """Nothing is open."""


def steps_of(work: Work) -> list[Step]:
    """The steps of `work`, which is run to its end in a forked process."""
    seen: list[Step] = []
    code, told = _forked(work, lambda _, step: seen.append(step), lambda _: seen)
    assert code == 0, "the operation failed although nobody disturbed it"
    return [(kind, path, other) for kind, path, other in told]


def killed(work: Work, at: int) -> bool:
    """Run `work` in a forked process that kills itself before step `at`; False when it ended before that."""

    def kill(number: int, _: Step) -> None:
        if number == at:
            os.kill(os.getpid(), signal.SIGKILL)

    return _forked(work, kill, lambda _: None)[0] == -signal.SIGKILL


def disturbed(work: Work, observer: Observer) -> Any:
    """What `work` gives in a forked process that calls `observer` before each step; what that raises, the step does."""
    code, told = _forked(work, observer, lambda result: result)
    assert code == 0, "the operation ended without an answer"
    return told


def _forked(work: Work, observer: Observer, report: Callable[[object], object]) -> tuple[int, Any]:
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reading)
        _run(work, observer, lambda result: os.write(writing, json.dumps(report(result)).encode()))
    os.close(writing)
    # As bytes, and to the end: the process may be killed in the middle.
    with os.fdopen(reading, "rb") as stream:
        data = stream.read()
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return code, json.loads(data) if not code else None


def _run(work: Work, observer: Observer, report: Callable[[object], object]) -> NoReturn:
    """In the forked process: `work` under observation, and never a return into the test."""
    code = 1
    try:
        _observe(observer)
        result = work()
        _observe_no_more()
        report(result)
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


_observer: Observer | None = None
_count = 0


def _step(kind: str, path: object, other: object = "") -> None:
    global _count  # noqa: PLW0603 - one process, one count
    if _observer is not None:
        _count += 1
        _observer(_count, (kind, _text(path), _text(other)))


def _text(path: object) -> str:
    if isinstance(path, int):
        return os.readlink(f"/proc/self/fd/{path}")
    return os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""


def _observe_no_more() -> None:
    global _observer  # noqa: PLW0603
    _observer = None


def _observe(observer: Observer) -> None:
    global _observer  # noqa: PLW0603
    _observer = observer
    sys.addaudithook(_hook)
    real_fsync, real_pwrite = os.fsync, os.pwrite

    def fsync(fd: int) -> None:
        _step("fsync", fd)
        real_fsync(fd)

    def pwrite(fd: int, data: bytes, at: int) -> int:
        _step("write", fd)
        return real_pwrite(fd, data, at)

    def opened(real: Callable[..., Any]) -> Callable[..., Any]:
        def open_(file: Any, mode: str = "r", *a: Any, **k: Any) -> Any:
            stream = real(file, mode, *a, **k)
            return _Halves(stream) if set(mode) & set("wxa+") else stream

        return open_

    os.fsync, os.pwrite = fsync, pwrite
    # `os.fdopen` goes by `io.open` as well.
    builtins.open = io.open = opened(builtins.open)


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if event in _EVENTS:
        if event in ("os.remove", "os.rmdir") and args[1] == -1 and not _removable(event, args[0]):
            return
        renamed = event == "os.rename"
        _step(event.rpartition(".")[2], args[renamed], args[0] if renamed else "")
    elif event == "open" and isinstance(args[2], int) and args[2] & _WRITING:
        new = not isinstance(args[0], int) and not os.path.lexists(args[0])
        _step("create" if new else "open", args[0])


def _removable(event: str, path: Any) -> bool:
    """Whether a removal changes anything: not where nothing is, or where a folder is in use."""
    return os.path.lexists(path) and not (event == "os.rmdir" and os.listdir(path))


class _Halves:
    """A stream whose writes reach the file in two halves, with a step before each."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, data: bytes) -> int:
        middle = len(data) // 2
        for part in (data[:middle], data[middle:]):
            _step("write", self._stream.fileno())
            self._stream.write(part)
            self._stream.flush()
        return len(data)

    def __enter__(self) -> _Halves:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
