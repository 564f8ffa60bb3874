# SPDX-License-Identifier: Apache-2.0
"""Which budgets an engine can verify: the configured one, or `auto`, which is the default, and the lanes of its choice.

A *lane* is a verify width (budget + 1) that the target's attention backend and CUDA graphs were built for. One budget
needs one lane. `auto`, and requests that ask for a budget of their own, need one for each budget.
"""

from __future__ import annotations

import re
from typing import Any

from sglang.srt.speculative.ddtree.given import shown, whole_number


AUTO = "auto"

#: Draft nodes of a tree when the user says nothing and `auto` cannot be served (`default_budget`).
DEFAULT_BUDGET = 64

#: What `auto` chooses among beside the chain's own width. Small ones pay where batches make the target compute-bound,
#: and 0, which drafts nothing, where they make drafts a loss. With the root they are rows that fill the tiles of matrix
#: products: on an H200 those of an 8B model take 6.4 ms for 32 times 8 rows, and 7.6 ms for 32 times 9
#: (`benchmarks/matmul_times.py`). Every request holds KV for the widest, so it is no wider than a fixed budget would
#: be: 128 was never the best there, and with one request within 5 % of it. 24 is for batches in which 32 rows a request
#: take longer than 16 and few more would not.
_AUTO_BUDGETS = (0, 2, 4, 7, 15, 24, 31, 63)


def is_auto(server_args: Any) -> bool:
    """Whether the budget is chosen while serving."""
    return bool(server_args.speculative_ddtree_budget == AUTO)


def budgets(server_args: Any) -> tuple[int, ...]:
    """Every budget that a lane is built for, ascending.

    Args:
        server_args: The arguments, or whatever shows the speculative ones (`published.spec`), with their budget
            settled. With `auto` and no list the block size has to be known.
    """
    listed = server_args.speculative_ddtree_budgets
    found = set(budget_list(listed)) if listed is not None else set()
    if not is_auto(server_args):
        found.add(int(server_args.speculative_ddtree_budget))
    elif listed is None:
        found.update(default_budgets(int(server_args.speculative_dflash_block_size)))
    return tuple(sorted(found))


def default_budgets(block_size: int) -> tuple[int, ...]:
    """What `auto` chooses among when no list is given: the chain's own width and the widest are always there.

    A lane one node wider than the chain's costs what that costs, or more.
    """
    return tuple(sorted({*_AUTO_BUDGETS, block_size - 1} - {block_size} | {_AUTO_BUDGETS[-1]}))


def are_default(server_args: Any) -> bool:
    """Whether `auto` chooses among the default budgets: then wide lanes are not captured for large batches."""
    return is_auto(server_args) and budgets(server_args) == default_budgets(
        int(server_args.speculative_dflash_block_size)
    )


def budget_list(given: Any) -> tuple[int, ...]:
    """The budgets of a list: "4,8,15", or numbers.

    Raises:
        ValueError: Not budgets; the text shows what was given.
    """
    parts = re.split(r"[,\s]+", given.strip()) if isinstance(given, str) else given
    numbers = [whole_number(part) for part in parts] if isinstance(parts, (list, tuple)) else []
    found = tuple(number for number in numbers if number is not None)
    if not found or len(found) < len(numbers) or min(found) < 0 or max(found) < 1:
        raise ValueError(
            "DDTREE requires --speculative-ddtree-budgets to be whole numbers with commas between them, at least one "
            f"above 0, like 4,8,15,32,64; got {shown(given)}. Give the budgets that {AUTO} and requests may choose, or "
            "leave it out."
        )
    return found


def parsed_budget(given: Any) -> int | str:
    """A budget as it was written: a number or its text, or `auto`.

    Raises:
        ValueError: No tree can have it; the text names the flag and shows what was given.
    """
    if isinstance(given, str) and given.strip().lower() == AUTO:
        return AUTO
    budget = whole_number(given)
    if budget is None or budget < 1:
        raise ValueError(
            f"DDTREE requires --speculative-ddtree-budget to be a whole number of at least 1, or {AUTO}, got "
            f"{shown(given)}. Give the draft nodes of a tree, like {DEFAULT_BUDGET}; to draft nothing leave out "
            "--speculative-algorithm."
        )
    return budget
