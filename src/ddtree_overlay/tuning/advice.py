# SPDX-License-Identifier: Apache-2.0
"""Which flags the measurement speaks for, and how loudly. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddtree_overlay.reports import listed
from ddtree_overlay.tuning.cells import LEAST_ROUNDS, Cell, Difference, difference
from ddtree_overlay.tuning.served import AUTO, CHAIN, NONE, Served, several


#: An arm that stays this close to the best one everywhere is taken for all concurrencies.
CLOSE = 0.97


@dataclass(frozen=True, slots=True)
class Best:
    """The best arm at one concurrency.

    Args:
        concurrency: Requests in flight.
        arm: The arm with the highest median.
        against_chain: That arm against the chain; None when it is the chain, or the chain was not measured.
        as_good: Other arms that cannot be told from it by these rounds.
    """

    concurrency: int
    arm: str
    against_chain: Difference | None
    as_good: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """The choice as `--json` prints it."""
        chain = self.against_chain.as_dict() if self.against_chain else None
        return {
            "concurrency": self.concurrency,
            "arm": self.arm,
            "against_chain": chain,
            "as_good": list(self.as_good),
        }


@dataclass(frozen=True, slots=True)
class Advice:
    """What to start the server with: `flags` (None when nothing can be said), why, and the best arms behind it."""

    flags: str | None
    arm: str | None
    why: str
    best: tuple[Best, ...]

    def as_dict(self) -> dict[str, Any]:
        """The advice as `--json` prints it."""
        return {"flags": self.flags, "arm": self.arm, "why": self.why, "best": [b.as_dict() for b in self.best]}


def advise(found: Sequence[Cell], served: Served) -> Advice:
    """The advice that these cells allow."""
    table = {(cell.concurrency, cell.arm): cell for cell in found}
    levels = sorted({cell.concurrency for cell in found})
    best = tuple(_best(level, [c for c in found if c.concurrency == level]) for level in levels)
    everywhere = [a for a in dict.fromkeys(c.arm for c in found) if all((level, a) in table for level in levels)]
    enough = max((len(cell.by_round) for cell in found), default=0) >= LEAST_ROUNDS
    if len({cell.arm for cell in found}) < 2 or not everywhere or not enough:
        return Advice(None, None, _nothing_to_say(found, served), best)
    scores = {arm: _score(arm, levels, best, table) for arm in everywhere}
    top = max(scores, key=lambda arm: scores[arm])
    if not _pays(best):
        return _without_gain(top, scores, best, served)
    if _holds(AUTO, scores, best):
        doubt = "; these rounds do not tell it from the best" if scores[AUTO] < CLOSE else ""
        return Advice(_flags(AUTO, served), AUTO, f"auto {_share(scores[AUTO], levels)}{doubt}", best)
    if len(levels) > 1 and AUTO not in {c.arm for c in found} and scores[top] < CLOSE:
        return Advice(_auto_of(best, served), AUTO, f"{_by_level(best)}; auto itself was not measured", best)
    why = f"{top} {_share(scores[top], levels)}"
    if top == NONE:
        why += ", which is plain decoding: without --speculative-algorithm no drafter is loaded either"
    return Advice(_flags(top, served), top, why + _of_auto(top, scores, levels), best)


def _best(level: int, row: Sequence[Cell]) -> Best:
    top = max(row, key=lambda cell: cell.tokens_per_s.median)
    chain = next((cell for cell in row if cell.arm == CHAIN), None)
    against = difference(top, chain) if chain and top is not chain else None
    others = [cell for cell in row if cell is not top]
    found = ((cell.arm, difference(cell, top)) for cell in others)
    return Best(level, top.arm, against, tuple(arm for arm, d in found if d and d.verdict in {"none", "unknown"}))


def _score(arm: str, levels: Sequence[int], best: Sequence[Best], table: dict[tuple[int, str], Cell]) -> float:
    """How close the arm comes to the best one where it is worst."""
    tops = {b.concurrency: table[b.concurrency, b.arm].tokens_per_s.median for b in best}
    return min(table[level, arm].tokens_per_s.median / tops[level] if tops[level] else 1.0 for level in levels)


def _pays(best: Sequence[Best]) -> bool:
    """Whether some arm is better than the chain somewhere; also when the chain was not measured."""
    return any(b.arm != CHAIN and (b.against_chain is None or b.against_chain.verdict == "faster") for b in best)


def _without_gain(top: str, scores: dict[str, float], best: tuple[Best, ...], served: Served) -> Advice:
    """The advice when nothing is faster than the chain: what runs now if that is as good, else the chain."""
    arm = next((a for a in (str(served.setting), CHAIN) if _holds(a, scores, best)), top)
    few = any(b.against_chain and b.against_chain.verdict == "unknown" for b in best)
    why = (
        "too few rounds to tell any arm from the chain" if few else "no arm is faster than the chain beyond the spread"
    )
    left = "; the server can stay as it is" if arm == str(served.setting) else ""
    return Advice(_flags(arm, served), arm, why + left, best)


def _holds(arm: str, scores: dict[str, float], best: Sequence[Best]) -> bool:
    """Whether the arm is close to the best one everywhere, or cannot be told from it anywhere."""
    return arm in scores and (scores[arm] >= CLOSE or all(arm == b.arm or arm in b.as_good for b in best))


def _of_auto(top: str, scores: dict[str, float], levels: Sequence[int]) -> str:
    return f"; auto {_share(scores[AUTO], levels)}" if AUTO in scores and top != AUTO else ""


def _share(score: float, levels: Sequence[int]) -> str:
    where = f"at {levels[0]} at a time" if len(levels) == 1 else "at every concurrency"
    return f"is the best {where}" if score >= 1 else f"has at least {score:.0%} of the best {where}"


def _by_level(best: Sequence[Best]) -> str:
    """Which arm is best where."""
    return listed((f"{b.arm} is best at {b.concurrency}" for b in best), 12)


def _nothing_to_say(found: Sequence[Cell], served: Served) -> str:
    """Why there is no advice."""
    arms = list(dict.fromkeys(cell.arm for cell in found))
    if not arms:
        return "nothing was measured"
    if len(arms) > 1:
        few = max(len(cell.by_round) for cell in found) < LEAST_ROUNDS
        least = f"{LEAST_ROUNDS} are the least that show a spread (--rounds, --seconds)"
        return f"too few rounds: {least}" if few else "no arm was measured at every concurrency"
    arm = arms[0]
    if len(served.arms) > 1:
        return f"only {arm} was measured: there is nothing to compare it with"
    return f"this server has the budget {arm} only: to compare others, restart it with {several(served.block_size)}"


def _flags(arm: str, served: Served) -> str:
    if arm == CHAIN:
        return f"--speculative-ddtree-budget {served.block_size - 1} --speculative-ddtree-topk-cap 1"
    if arm in {AUTO, NONE}:  # no flag asks for steps without a draft alone; `auto` may choose them
        several = f" --speculative-ddtree-budgets {_commas(served.budgets)}" if served.budgets else ""
        return f"--speculative-ddtree-budget {AUTO}{several}"
    return f"--speculative-ddtree-budget {arm}"


def _auto_of(best: Sequence[Best], served: Served) -> str:
    """`auto` with the budgets that are best somewhere."""
    known = {CHAIN: served.block_size - 1, NONE: 0}
    budgets = {known[b.arm] if b.arm in known else int(b.arm) for b in best if b.arm != AUTO}
    chain = {served.block_size - 1} if served.block_size > 1 else set()
    return f"--speculative-ddtree-budget auto --speculative-ddtree-budgets {_commas(sorted(budgets | chain))}"


def _commas(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
