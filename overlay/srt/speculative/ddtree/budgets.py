# SPDX-License-Identifier: Apache-2.0
"""Which budgets an engine can verify: the configured one, or `auto` and the lanes that it chooses among.

A *lane* is a verify width (budget + 1) that the target's attention backend and CUDA graphs were built for. One budget
needs one lane. `auto`, and requests that ask for a budget of their own, need one for each budget.
"""

from __future__ import annotations

import re
from typing import Any


AUTO = "auto"

#: Draft nodes of a tree when the user says nothing; the field of `ServerArgs` has the same default.
DEFAULT_BUDGET = 64

#: What `auto` chooses among beside the chain's own width. Small ones pay where batches make the target compute-bound,
#: 128 with one or two requests.
_AUTO_BUDGETS = (2, 4, 8, 32, 64, 128)


def is_auto(server_args: Any) -> bool:
    """Whether the budget is chosen while serving."""
    return bool(server_args.speculative_ddtree_budget == AUTO)


def budgets(server_args: Any) -> tuple[int, ...]:
    """Every budget that a lane is built for, ascending.

    Args:
        server_args: The arguments, or whatever shows the speculative ones (`published.spec`). With `auto` and no list
            the block size has to be known.
    """
    listed = server_args.speculative_ddtree_budgets
    found = set(budget_list(listed)) if listed is not None else set()
    if not is_auto(server_args):
        found.add(int(server_args.speculative_ddtree_budget))
    elif listed is None:
        found.update(default_budgets(int(server_args.speculative_dflash_block_size)))
    return tuple(sorted(found))


def default_budgets(block_size: int) -> tuple[int, ...]:
    """What `auto` chooses among when no list is given: the chain's own width is always there."""
    return tuple(sorted({*_AUTO_BUDGETS, block_size - 1}))


def are_default(server_args: Any) -> bool:
    """Whether `auto` chooses among the default budgets: then wide lanes are not captured for large batches."""
    chosen = tuple(budget for budget in budgets(server_args) if budget)
    return is_auto(server_args) and chosen == default_budgets(int(server_args.speculative_dflash_block_size))


def budget_list(given: Any) -> tuple[int, ...]:
    """The budgets of a list: "4,8,15", or numbers.

    Raises:
        ValueError: Not budgets; the text shows what was given.
    """
    parts = re.split(r"[,\s]+", given.strip()) if isinstance(given, str) else list(given)
    try:
        found = tuple(int(part) for part in parts)
    except (TypeError, ValueError):
        found = ()
    if not found or min(found) < 0 or max(found) < 1:
        raise ValueError(
            f"DDTREE requires --speculative-ddtree-budgets to be numbers with commas between them, like 4,8,15,32,64, "
            f"or 0 for steps that draft nothing; got {given!r}."
        )
    return found


def parsed_budget(given: Any) -> int | str:
    """A budget as it was written: a number, or `auto`.

    Raises:
        ValueError: Neither.
    """
    text = str(given).strip().lower()
    return AUTO if text == AUTO else int(text)


def check_budgets(server_args: Any) -> None:
    """Refuse budgets that no tree can have.

    Raises:
        ValueError: The text names the flag.
    """
    budget = server_args.speculative_ddtree_budget
    if budget != AUTO and (not isinstance(budget, int) or budget < 1):
        raise ValueError(
            f"DDTREE requires --speculative-ddtree-budget to be at least 1, or {AUTO}, got {budget}. "
            "Without draft nodes there is nothing to verify: leave out --speculative-algorithm instead."
        )
    if server_args.speculative_ddtree_budgets is not None:
        budget_list(server_args.speculative_ddtree_budgets)
