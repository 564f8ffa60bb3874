# SPDX-License-Identifier: Apache-2.0
"""Memory that is free while the target's graphs are captured, and not to be had: the drafter is loaded after them."""

from __future__ import annotations

from typing import Any


def promised_bytes(model_runner: Any) -> int:
    """Bytes of the drafter's KV pool. SGLang left room for it when it sized the target's: as many slots, fewer layers.

    Args:
        model_runner: The target's, with its pool.
    """
    pool = model_runner.token_to_kv_pool
    if not hasattr(pool, "k_buffer"):
        return 0  # a kind that is refused once the drafter is loaded
    of_target = sum(buffer.nbytes for buffer in (*pool.k_buffer, *pool.v_buffer))
    return of_target * int(model_runner.dflash_draft_num_layers) // len(pool.k_buffer)
