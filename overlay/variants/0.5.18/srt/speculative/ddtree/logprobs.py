# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of the emitted tokens."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.speculative.ddtree.commit import committed_rows


def add_logprobs(batch: Any, logits_output: Any, tokens: Any, rows: Any, block_size: int) -> None:
    """Report the log-probabilities of the emitted tokens, if a request asks for them.

    Args:
        tokens: Int64 [bs, B]; token j of a request was chosen at step j of its path.
        rows: Row of each path node among all nodes of the batch, int64 [bs, P].
        block_size: B.
    """
    if batch.return_logprob:
        # SGLang gathers a chain's rows by their place; here the path's rows are put there.
        logits_output.next_token_logits = committed_rows(logits_output.next_token_logits, rows, block_size)
        compute_spec_logprobs(batch, logits_output, tokens.reshape(-1), chain_stride=block_size)
