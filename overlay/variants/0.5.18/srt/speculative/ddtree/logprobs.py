# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of the emitted tokens."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.speculative.ddtree.accept import Acceptance
from sglang.srt.speculative.ddtree.commit import committed_rows


def add_logprobs(batch: Any, logits_output: Any, acceptance: Acceptance) -> None:
    """Report the log-probabilities of the emitted tokens, if a request asks for them."""
    if batch.return_logprob:
        tokens = acceptance.tokens
        # SGLang gathers a chain's rows by their place; here the path's rows are put there.
        logits_output.next_token_logits = committed_rows(logits_output.next_token_logits, acceptance)
        compute_spec_logprobs(batch, logits_output, tokens.reshape(-1), chain_stride=tokens.shape[1])
