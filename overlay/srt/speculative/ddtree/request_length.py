# SPDX-License-Identifier: Apache-2.0
"""The longest request that is admitted: its last step has to fit into the KV pool beside its own tokens."""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.speculative.ddtree.args import verify_width
from sglang.srt.speculative.ddtree.budgets import is_auto
from sglang.srt.speculative.ddtree.gates import is_ddtree_on
from sglang.srt.speculative.ddtree.held_slots import held_slots
from sglang.srt.speculative.ddtree.published import spec


logger = logging.getLogger(__name__)

#: Tokens that SGLang keeps between the longest input and the longest request.
SPARE_INPUT = 5


def longest_request(model_runner: Any, longest: int) -> int:
    """The longest request whose last step fits into the KV pool beside its own tokens.

    SGLang admits up to the pool's size. Such a request would be aborted half-way, when nothing is left to retract.

    Args:
        model_runner: The target's.
        longest: What SGLang would admit.

    Raises:
        ValueError: The pool cannot hold one step of any request.
    """
    if not is_ddtree_on():
        return longest
    pool, page_size = int(model_runner.token_to_kv_pool_allocator.size), int(model_runner.page_size)
    # A step may begin in the last slot of a page; whatever it does not fill of its own last page is held as well.
    held = held_slots(verify_width(spec()), page_size)
    fits = min(longest, pool // page_size * page_size - held)
    if fits <= SPARE_INPUT:
        fixed = "Use a small --speculative-ddtree-budget alone, lower"
        lower = fixed if is_auto(spec()) else "Lower --speculative-ddtree-budget or"
        raise ValueError(
            f"DDTREE holds {held} KV slots of a request for what its next step may write, but the pool holds {pool} "
            f"tokens. {lower} --speculative-ddtree-budgets, or raise --mem-fraction-static."
        )
    if fits < longest:
        logger.warning(
            "DDTREE: requests are limited to %d tokens; %d of %d slots are held for what a step may write.",
            fits, held, pool,
        )  # fmt: skip
    return fits
