# SPDX-License-Identifier: Apache-2.0
"""Where a request ends within the tokens of a step: at the token at which plain decoding ends it.

SGLang looks at all tokens of a step at once. It asks for stop strings before stop tokens and, in some releases, for the
length before either, so that of several ends in one step it may take a later one; and a pattern that matches only
where a text ends is seen only where the step ends. A chain of a few tokens seldom meets that, a tree more often.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.speculative.ddtree.gates import is_ddtree_on


def look_at_each_token(req: Any, count: int) -> bool:
    """Let a request look at the newest tokens one by one, if one look at all of them could end it elsewhere.

    The tokens behind its end stay where they are, as behind any end that SGLang finds itself.

    Args:
        req: With the tokens of a step at the end of its output.
        count: How many they are, at least 2.

    Returns:
        Whether it has; else SGLang's look at all of them gives the same.
    """
    params, output = req.sampling_params, req.output_ids
    before = len(output) - count
    is_text = bool(params.stop_strs or params.stop_regex_strs)
    if not is_ddtree_on() or req.finished() or req.to_finish:
        return False
    if not is_text and len(output) < params.max_new_tokens and req.reasoning_tokens <= before:
        return False
    tokens = output[before:]
    del output[before:]
    # It has advanced over the whole step, which it never lets go on behind its end.
    grammar, req.grammar = req.grammar, None
    for token in tokens:
        output.append(token)
        if len(output) == before + count:
            req.grammar = grammar
        req.update_finish_state()
        if req.finished():
            break
    req.grammar = grammar
    kept = len(output)
    output.extend(tokens[kept - before :])
    if req.finished() and req.finished_len is None:
        req.finished_len = kept
    if req.finished():
        # They were counted before anything looked for an end, over the whole step (sglang#39826).
        req.reasoning_tokens = min(req.reasoning_tokens, req.finished_len)
    return True
