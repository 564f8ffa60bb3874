# SPDX-License-Identifier: Apache-2.0
"""One piece of work on many hosts at once: bounded, every result kept, and every line told by one thread.

The threads are daemons of the thread that waits for them: work on a host that has stalled must not keep the command
from ending once its user has pressed Ctrl-C twice.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from ddtree_overlay.errors import OverlayError


class Named(Protocol):
    """Anything that is called by the name of a host."""

    @property
    def name(self) -> str:
        """The host's name."""
        ...


M = TypeVar("M", bound=Named)
R = TypeVar("R")
Say = Callable[[str], None]
#: Host, a line about it, and, when its work has ended, the result in a tuple of one. No host: Ctrl-C was pressed.
News = tuple[str, str, "tuple[Any] | None"]


class FaultError(OverlayError):
    """A fault of our own in the middle of work on a host: what it left there is not known."""


class GivenUpError(OverlayError):
    """The user did not want to wait any longer for work on a host; what becomes of it is not known."""

    exit_code = 130


class Crew:
    """Works on up to `parallel` hosts at a time. `interrupted` after the first Ctrl-C, `abandoned` after the second.

    Args:
        parallel: The most hosts that are worked on at the same time.
        tell: Prints a line about a host (name, text); only ever called by the thread that called `each`.
    """

    def __init__(self, parallel: int, tell: Callable[[str, str], None]) -> None:
        self.parallel = max(1, parallel)
        self.interrupted = False
        self.abandoned = False
        self._tell = tell
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()

    def tell(self, name: str, text: str) -> None:
        """Say a line. A terminal that is gone, or a full disk behind stderr, must not end the work half-way."""
        with contextlib.suppress(OverlayError, OSError, ValueError):
            self._tell(name, text)

    @contextlib.contextmanager
    def minding_interrupts(self) -> Iterator[None]:
        """Let Ctrl-C, a lost terminal and `kill` stop the work in an orderly way; in the main thread only."""
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        # Whoever started us with nohup does not want to be interrupted.
        minded = {number: old for number, old in before.items() if old is not signal.SIG_IGN}
        for number in minded:
            signal.signal(number, lambda *_: self.interrupt())
        try:
            yield
        finally:
            for number, old in minded.items():
                signal.signal(number, old or signal.SIG_DFL)

    def interrupt(self) -> None:
        """Begin with nothing new; at the second call, wait for nothing either. Safe in a signal handler."""
        self._news.put(("", "", None))

    def each(
        self, members: Sequence[M], work: Callable[[M, Say], R], *, halt: bool = False, stubborn: bool = False
    ) -> dict[str, R | OverlayError]:
        """Run `work(member, say)` for every member; `say` tells a line about it.

        Args:
            members: The hosts.
            work: Runs in another thread.
            halt: Begin with no further member once one has failed.
            stubborn: Begin with every member even after a Ctrl-C: work that puts things back.

        Returns:
            Result or error by name. Members that were not begun with are missing.
        """
        run = _Run(members, work, self._news, halt=halt)
        if self.abandoned or (self.interrupted and not stubborn):
            return {}
        for _ in range(min(self.parallel, len(members))):
            threading.Thread(target=run.work_off, daemon=True).start()
        while not run.over():
            name, text, result = self._news.get()
            if result:
                run.results[name] = result[0]
            elif name:
                self.tell(name, text)
            elif self.interrupted:
                self.abandoned = True
                return run.given_up()
            else:
                self.interrupted = True
                if not stubborn:
                    run.begin_no_more()
                self.tell("", "interrupted; waiting for what has begun (Ctrl-C again: do not wait)")
        return dict(run.results)


class _Run(Generic[M, R]):
    """One call of `Crew.each`: the members that are still to be begun with, and those that were."""

    def __init__(
        self, members: Sequence[M], work: Callable[[M, Say], R], news: queue.SimpleQueue[News], *, halt: bool
    ) -> None:
        self.results: dict[str, R | OverlayError] = {}
        self._todo = list(members)
        self._begun: list[str] = []
        self._lock = threading.Lock()
        self._work = work
        self._news = news
        self._halt = halt

    def over(self) -> bool:
        """Whether every member that was begun with, or still will be, has its result."""
        with self._lock:
            return not self._todo and len(self.results) == len(self._begun)

    def begin_no_more(self) -> None:
        """Leave the members alone that nobody has begun with."""
        with self._lock:
            self._todo.clear()

    def given_up(self) -> dict[str, R | OverlayError]:
        """The results so far; members without one count as given up."""
        self.begin_no_more()
        missing = {n: GivenUpError(f"{n}: not waited for any longer") for n in self._begun if n not in self.results}
        return {**self.results, **missing}

    def work_off(self) -> None:
        """Take members until there are none left; the body of a thread."""
        while (member := self._next()) is not None:
            result = self._one(member)
            if self._halt and isinstance(result, OverlayError):
                self.begin_no_more()
            self._news.put((member.name, "", (result,)))

    def _next(self) -> M | None:
        with self._lock:
            if not self._todo:
                return None
            member = self._todo.pop(0)
            self._begun.append(member.name)
            return member

    def _one(self, member: M) -> R | OverlayError:
        try:
            return self._work(member, lambda text: self._news.put((member.name, text, None)))
        except OverlayError as e:
            return e
        except Exception as e:
            return FaultError(
                f"{member.name}: fault in ddtree-overlay: {type(e).__name__}: {e}",
                next_step="run it again with -vv and report what it prints",
            )
