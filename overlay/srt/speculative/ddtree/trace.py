# SPDX-License-Identifier: Apache-2.0
"""A JSON line per verified tree, written where `SGLANG_DDTREE_TRACE` points. Slow: for tests and debugging."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from sglang.srt.speculative.ddtree.accept import Acceptance
from sglang.srt.speculative.ddtree.tree import Tree


TRACE_VARIABLE = "SGLANG_DDTREE_TRACE"


def is_tracing() -> bool:
    """Whether steps are written down."""
    return bool(os.environ.get(TRACE_VARIABLE))


def trace_step(
    rids: list[str],
    prefix_lens: list[int],
    tree: Tree,
    acceptance: Acceptance,
    committed: list[int],
    *,
    exact: torch.Tensor | None,
) -> None:
    """Append each request's tree, accepted path and committed token count, if tracing is on.

    Args:
        rids: Request ids, in batch order.
        prefix_lens: Committed tokens before the step.
        committed: Tokens the step committed; fewer than the path and its bonus when a stop cut it.
        exact: Whether each tree can be shown to be the one without a top-k cap.
    """
    target = os.environ.get(TRACE_VARIABLE)
    if not target:
        return
    fields: dict[str, Any] = {
        name: getattr(tree, name).tolist() for name in ("tokens", "parents", "depths", "ranks", "scores")
    }
    paths = [[node for node in path if node >= 0] for path in acceptance.path.tolist()]
    with open(target, "a") as out:
        for i, rid in enumerate(rids):
            line = {name: values[i] for name, values in fields.items()}
            # -inf is no JSON
            line["scores"] = [None if score == float("-inf") else score for score in line["scores"]]
            line |= {"rid": rid, "prefix_len": prefix_lens[i], "path": paths[i], "committed": committed[i]}
            line |= {"bonus": int(acceptance.bonus[i]), "exact": None if exact is None else bool(exact[i])}
            out.write(json.dumps(line) + "\n")
