# SPDX-License-Identifier: Apache-2.0
"""Waiting without a race: for the whole of what is asserted, until what would be a hang, never for so many seconds.

Two cores may be busy with ten other things. So nothing here measures how fast something is: a deadline only tells what
hangs from what is slow. Where a time has to run out for a test to mean anything, `patience` makes it longer where work
takes longer.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar


#: What has not happened after this many seconds never will; pytest gives a test 900.
HANG = 60.0
#: How long whatever a test ends itself may live: longer than any test.
AGES = 1000
#: A time that has to run out is this many times what the work inside it took a moment ago, and no longer than that.
_MARGIN, _MOST = 15, 80.0
R = TypeVar("R")


def until(condition: Callable[[], R], seconds: float = HANG, *, said: Callable[[], object] = lambda: "") -> R:
    """What `condition` gives once that is true; `said` tells what is known when it never is."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"it did not happen within {seconds:.0f} s {said()}"
        time.sleep(0.02)
    return found


def settled(look: Callable[[], R], wanted: Any, seconds: float = HANG) -> R:
    """What `look` gives, looked at until it is `wanted` or time is up: for an `assert` that shows the difference."""
    end = time.monotonic() + seconds
    while (found := look()) != wanted and time.monotonic() < end:
        time.sleep(0.05)
    return found


@contextlib.contextmanager
def no_hang(seconds: float = HANG) -> Iterator[None]:
    """Fail where what is inside ends, but only after something that it must not wait for."""
    start = time.monotonic()
    yield
    assert (took := time.monotonic() - start) < seconds, f"it took {took:.1f} s"


def timed(call: Callable[[], R]) -> tuple[R, float]:
    """What `call` gives, and the seconds that it took."""
    start = time.monotonic()
    return call(), time.monotonic() - start


def patience(least: float, took: float) -> float:
    """A time-out that work which took `took` seconds a moment ago does not meet: `least`, or more on a busy machine."""
    return max(least, min(_MARGIN * took, _MOST))


def hold(there: object, go: object) -> str:
    """Lines of Python that make the file `there`, and then stand still until the file `go` is there."""
    return (
        f"import os, time; open({str(there)!r}, 'w').close(); end = time.monotonic() + {AGES}\n"
        f"while not os.path.exists({str(go)!r}) and time.monotonic() < end: time.sleep(0.02)"
    )
