# SPDX-License-Identifier: Apache-2.0
"""Which runs are measured, in which order, and with which prompts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ddtree_overlay.reports import counted, listed
from ddtree_overlay.tuning.served import Arm


_Item = TypeVar("_Item")
#: The round whose runs are not counted.
WARM_UP = 0


@dataclass(frozen=True, slots=True)
class Settings:
    """How to measure.

    Args:
        concurrencies: Requests in flight, ascending.
        rounds: Measured runs of each arm at each concurrency.
        requests: Requests of a run, at least; a run at a concurrency of c has 2 c, so that the first and the last ones
            are not all.
        max_new_tokens: Tokens of a request, at most.
        temperature: 0 is greedy.
        ignore_eos: Decode on to `max_new_tokens` always.
    """

    concurrencies: tuple[int, ...]
    rounds: int = 5
    requests: int = 8
    max_new_tokens: int = 128
    temperature: float = 0.0
    ignore_eos: bool = False

    def size(self, concurrency: int) -> int:
        """The number of requests of a run."""
        return max(self.requests, 2 * concurrency)

    def sampling(self, arm: Arm, *, most: int | None = None) -> dict[str, Any]:
        """The sampling parameters of a request, of `most` tokens if that is less."""
        tokens = min(most or self.max_new_tokens, self.max_new_tokens)
        found: dict[str, Any] = {"temperature": self.temperature, "max_new_tokens": tokens, **arm.custom_params}
        return {**found, "ignore_eos": True} if self.ignore_eos else found

    def as_dict(self) -> dict[str, Any]:
        """The settings as `--json` prints them."""
        return {
            "concurrencies": list(self.concurrencies),
            "rounds": self.rounds,
            "requests": {str(c): self.size(c) for c in self.concurrencies},
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "ignore_eos": self.ignore_eos,
        }


@dataclass(frozen=True, slots=True)
class Run:
    """One arm at one concurrency in one round; round 0 warms up and is not counted."""

    round: int
    concurrency: int
    arm: Arm

    @property
    def warm_up(self) -> bool:
        """Whether it is not counted."""
        return self.round == WARM_UP


def plan_runs(arms: Sequence[Arm], settings: Settings) -> tuple[Run, ...]:
    """All runs, round by round: in each round every concurrency has every arm, one directly after the other.

    So a machine that becomes slower does so for all arms. Each round starts with another arm, and every second one
    goes backwards, so that no arm always follows the same one.
    """
    runs = []
    for round_ in range(settings.rounds + 1):
        order = [*arms[round_ % len(arms) :], *arms[: round_ % len(arms)]]
        if round_ % 2:
            order.reverse()
        runs += [Run(round_, concurrency, arm) for concurrency in settings.concurrencies for arm in order]
    return tuple(runs)


def pick(items: Sequence[_Item], run: Run, size: int) -> list[_Item]:
    """The prompts of a run: the same for every arm of a round, others in the next round."""
    start = max(0, run.round - 1) * size
    return [items[(start + i) % len(items)] for i in range(size)]


def dropped(planned: Iterable[Run], done: Iterable[Run]) -> list[str]:
    """What was planned and not measured, in words; empty when nothing is missing."""
    have = set(done)
    missing = [run for run in planned if not run.warm_up and run not in have]
    lost: dict[tuple[int, str], list[int]] = {}
    for run in missing:
        lost.setdefault((run.concurrency, run.arm.name), []).append(run.round)
    by_rounds: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    for (concurrency, arm), rounds in lost.items():
        by_rounds.setdefault((concurrency, tuple(rounds)), []).append(arm)
    return [
        f"{concurrency} at a time, {listed(arms, 12)}: {counted(len(rounds), 'round')} ({listed(rounds, 8)})"
        for (concurrency, rounds), arms in sorted(by_rounds.items())
    ]
