# SPDX-License-Identifier: Apache-2.0
"""What the start-up measurement says of a choice that was not measured since, beside others that were."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from sglang.srt.speculative.ddtree.round_times import Choice


#: Rows that a target verifies in the time of one: it reads its weights, and the host launches it.
_FREE = 64


class StartUp:
    """Milliseconds that steps took at start-up at least, which captured graphs were timed for.

    Args:
        prior: By bucket and choice; may lack some.
    """

    def __init__(self, prior: Mapping[tuple[int, Choice], float]) -> None:
        # Nothing takes no time: a clock that says so knows nothing.
        prior = {key: time for key, time in prior.items() if time > 0.0}
        # No width is cheaper than a narrower one: what was measured to be was disturbed.
        self._prior = {
            (bucket, choice): min(
                time for (where, other), time in prior.items() if where == bucket and other.width >= choice.width
            )
            for bucket, choice in prior
        }

    def __bool__(self) -> bool:
        """Whether anything was measured."""
        return bool(self._prior)

    def known(self, bucket: int, choice: Choice) -> float:
        """Milliseconds that were measured; 0 if none were."""
        return self._prior.get((bucket, choice), 0.0)

    def guess(self, bucket: int, choice: Choice, times: Mapping[Choice, float]) -> float:
        """What a step of a choice takes, from what others take, if all of the difference at start-up is seen."""
        nearest, base, reference = self._nearest(bucket, choice, times)
        took = times[nearest]
        if not self._prior:
            ratio = _rows(bucket, choice) / _rows(bucket, nearest)
            return _between(choice, times, took * (ratio if ratio <= 1.0 else ratio**0.3))
        return _between(choice, times, max(took * min(1.0, base / reference), took + base - reference))

    def least(self, bucket: int, choice: Choice, times: Mapping[Choice, float]) -> float:
        """What it takes at least.

        A host that is slower than the device hides what a wider graph takes more, and one that hides nothing gains
        all that a narrower one takes less.
        """
        nearest, base, reference = self._nearest(bucket, choice, times)
        took = times[nearest]
        if not self._prior:
            more = _rows(bucket, choice) / _rows(bucket, nearest) / 2.0  # so wide again may cost nothing
            least = took * min(choice.width / nearest.width, max(1.0, more) ** 0.25)
        elif base < reference:
            least = took * base / reference
        else:
            least = max(took, base)
        return _between(choice, times, least)

    def most(self, bucket: int, choice: Choice, beside: Choice, took: float) -> float:
        """What it takes at most, where another one takes so long: what a draft costs the host is not known."""
        if choice.width <= beside.width:
            return took
        if not self._prior or beside.shape == "none":
            return math.inf
        return took + max(0.0, self.base(bucket, choice) - self.base(bucket, beside))

    def _nearest(self, bucket: int, choice: Choice, times: Mapping[Choice, float]) -> tuple[Choice, float, float]:
        nearest = min(times, key=lambda known: (abs(known.width - choice.width), known))
        return nearest, self.base(bucket, choice), self.base(bucket, nearest)

    def base(self, bucket: int, choice: Choice) -> float:
        """The start-up measurement, or the nearest one: of the next wider choice, else of the next bucket; else 1."""
        found = self._prior.get((bucket, choice))
        if found is not None:
            return found
        same = [
            (abs(other.width - choice.width), time)
            for (where, other), time in self._prior.items()
            if where == bucket and other.width >= choice.width
        ]
        if same:
            return min(same)[1]
        elsewhere = [
            (abs(where - bucket), time) for (where, other), time in self._prior.items() if other.width == choice.width
        ]
        return min(elsewhere)[1] if elsewhere else 1.0


def _rows(bucket: int, choice: Choice) -> int:
    return max(_FREE, bucket * choice.width)


def _between(choice: Choice, times: Mapping[Choice, float], guess: float) -> float:
    """No width is cheaper than a narrower one, whatever start-up said."""
    floor = max((time for known, time in times.items() if known.width <= choice.width), default=0.0)
    ceiling = min((time for known, time in times.items() if known.width >= choice.width), default=guess)
    return max(floor, min(guess, ceiling)) if choice.shape == "tree" else min(guess, ceiling)
