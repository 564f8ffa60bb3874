# SPDX-License-Identifier: Apache-2.0
"""Requests that DFLASH serves in this release and a tree does not."""

from __future__ import annotations

from typing import Any

from sglang.srt.speculative.ddtree.gates import is_ddtree_on


#: What a request may ask for -> why a tree does not give it.
_REFUSED = {
    "return_hidden_states": "the hidden states of a step are those of its tree, not of the tokens it emits",
    "return_sampling_mask": "the sampling mask of a step is that of a chain",
}


def request_refusal(req: Any) -> str | None:
    """Why DDTREE does not serve a request, or None: it does, or another algorithm is on."""
    if not is_ddtree_on():
        return None
    for wish, reason in _REFUSED.items():
        if getattr(req, wish, False):
            return f"DDTREE does not support {wish}: {reason}. Leave it out, or use --speculative-algorithm DFLASH."
    return None
