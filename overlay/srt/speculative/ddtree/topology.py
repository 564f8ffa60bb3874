# SPDX-License-Identifier: Apache-2.0
"""How many rows of a replayed CUDA graph are requests."""

from __future__ import annotations

from typing import Any

from sglang.srt.speculative.dflash_info import DFlashVerifyInput


def padding_rows(counted: Any, rows: int, spec_info: Any) -> Any:
    """How many rows of a replayed CUDA graph are padding, behind the batch's requests.

    SGLang counts rows as long as the filling, 1. The prefix of a verify step may be one token too: then the last
    request of the batch, whichever it is, was run without its recurrent state in that step. DFLASH has the same fault,
    so that every DFLASH verify input is counted here.

    Args:
        counted: SGLang's own count.
        rows: Rows of the graph.
        spec_info: What the forward verifies, or None.

    Returns:
        The count, int; `counted` as it is for what is no DFLASH or DDTREE verify input, and for one without tokens
        (a graph's capture, the drafter's block).
    """
    tokens = spec_info.draft_token if isinstance(spec_info, DFlashVerifyInput) else None
    if tokens is None or not tokens.numel():
        return counted
    return rows - tokens.numel() // spec_info.draft_token_num
