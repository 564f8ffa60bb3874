# SPDX-License-Identifier: Apache-2.0
"""What a step emits, appended to its requests; they stop where SGLang stops them.

SGLang looks at every token by itself, up to a look into the tokenizer for each. Most steps end no request: whether one
could end is told from sets that each request finds once, and SGLang is asked only then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.speculative.ddtree.counting import count_step
from sglang.srt.speculative.ddtree.finishing import finish_if_due


if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

#: Where a request keeps its stop tokens.
_STOP_TOKENS = "ddtree_stop_tokens"


def emit(batch: ScheduleBatch, tokens: list[list[int]], accept_lens: list[int]) -> list[int]:
    """Append accepted tokens and bonus to each request until it finishes: how many of each.

    k appended tokens commit k nodes: the root and all but the last of them; the last is the next round's root.

    Args:
        batch: Whose requests run.
        tokens: Accepted tokens, then the bonus, of each request.
        accept_lens: How many of them are accepted ones.
    """
    committed = []
    think_end_id = batch.model_config.think_end_id
    for req, emitted, accepted in zip(batch.reqs, tokens, accept_lens, strict=True):
        new = emitted[: accepted + 1]
        reasons = req.require_reasoning and think_end_id is not None
        if not reasons and goes_on(req, new):
            req.output_ids.extend(new)
            appended = accepted + 1
        else:
            appended = _append_one_by_one(req, new, think_end_id if reasons else None)
        count_step(req, appended - 1)
        committed.append(appended)
    return committed


def goes_on(req: Any, new: list[int]) -> bool:
    """Whether none of these tokens can finish the request, whichever of them it ends with.

    A stop string may be gone from the text's end when the last token is there, and a grammar may be over: such a
    request looks at each token.
    """
    params = req.sampling_params
    return not (
        params.stop_strs
        or params.stop_regex_strs
        or req.to_finish
        or req.grammar is not None
        or len(req.output_ids) + len(new) >= params.max_new_tokens
        or not stop_tokens(req).isdisjoint(new)
        or max(new) > req.vocab_size
        or min(new) < 0
    )


def stop_tokens(req: Any) -> frozenset[int]:
    """Every token that finishes the request, wherever SGLang looks for it; a tokenizer takes long to tell its own."""
    found: frozenset[int] | None = getattr(req, _STOP_TOKENS, None)
    if found is None:
        params, tokenizer = req.sampling_params, req.tokenizer
        groups = [] if params.ignore_eos else [params.stop_token_ids, req.eos_token_ids]
        if groups and tokenizer is not None:
            groups += [{tokenizer.eos_token_id}, tokenizer.additional_stop_token_ids]
        found = frozenset(token for group in groups if group for token in group)
        setattr(req, _STOP_TOKENS, found)
    return found


def _append_one_by_one(req: Any, new: list[int], think_end_id: int | None) -> int:
    """Append tokens until one finishes the request: how many."""
    for appended, token in enumerate(new, 1):
        req.output_ids.append(token)
        if think_end_id is not None:
            req.update_reasoning_tokens(token, think_end_id)
        finish_if_due(req)
        if req.finished():
            return appended
    return len(new)
