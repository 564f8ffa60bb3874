# SPDX-License-Identifier: Apache-2.0
"""What is known of the rounds of one batch bucket: what each choice takes, at which level, and looks not yet judged."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from sglang.srt.speculative.ddtree.start_up_bounds import StartUp


if TYPE_CHECKING:
    from sglang.srt.speculative.ddtree.round_times import Choice

#: Rounds of the choice in use that the level is a quartile of: what disturbs a step makes it longer.
_LEVELS = 48
#: Looks that can wait for what runs after them.
_LOOKS = 8


@dataclass
class ChoiceTime:
    """What a choice takes in a bucket."""

    #: While the bucket's level is 1.
    milliseconds: float
    #: Rounds that were measured, and those of them that were compared with another choice's.
    rounds: int
    compared: int
    #: Rounds that there had been in this bucket by then, of all choices.
    last: int
    #: What its last look showed, if start-up says that it cannot be so.
    strange: float | None = None
    #: Whether that was seen again, and so is believed.
    is_odd: bool = False


class Look(NamedTuple):
    """Rounds of one choice that came between those of another."""

    choice: Choice
    milliseconds: float
    rounds: int


@dataclass
class BucketTimes:
    """What is known of a bucket's rounds; all but the choice in use was compared with that one."""

    #: The choice in use, what its last rounds took, and whether those before them took the same.
    used: Choice
    took: float
    #: What start-up says of it, as far as that is believed.
    start_up: StartUp
    is_settled: bool = True
    times: dict[Choice, ChoiceTime] = field(default_factory=dict)
    #: What rounds of the choice in use took lately, over what is kept of it, and the level that this makes.
    levels: deque[float] = field(default_factory=lambda: deque(maxlen=_LEVELS))
    level: float = 1.0
    #: What was in use before it and took so long, until that is looked at: if the one in use was hardly compared, it is
    #: as likely that it seemed too good as that everything takes longer since.
    former: tuple[Choice, float] | None = None
    #: What ran since its last rounds.
    looks: deque[Look] = field(default_factory=lambda: deque(maxlen=_LOOKS))
    #: Rounds so far, of all choices.
    rounds: int = 0
    #: How many rounds running took less than they can by what start-up says.
    quicker: int = 0

    def use(self, seen: Look) -> None:
        """The choice in use took so long."""
        if seen.choice != self.used:
            self.former = self.used, self.took
        self.used, self.took = seen.choice, seen.milliseconds
        known = self.times[seen.choice]
        known.rounds, known.last = known.rounds + seen.rounds, self.rounds
        self.levels.extend([seen.milliseconds / known.milliseconds] * seen.rounds)
        self.level = sorted(self.levels)[len(self.levels) // 4]

    def disbelieve(self) -> None:
        """Go on as if nothing had been timed at start-up; what others seem to take was held to that."""
        self.start_up = StartUp({})
        self.times = {self.used: self.times[self.used]}
        self.looks.clear()

    def now(self, choice: Choice) -> float:
        """Milliseconds that a choice takes now, as far as looks told."""
        return self.times[choice].milliseconds * self.level
