# SPDX-License-Identifier: Apache-2.0
"""Room for what the scheduler reserves ahead: a step, and the tokens of the one before, which is not counted yet."""

from __future__ import annotations

from typing import Any

import msgspec
from sglang.srt.speculative.ddtree.args import draft_width, largest_width
from sglang.srt.speculative.ddtree.budgets import budgets
from sglang.srt.speculative.ddtree.gates import is_ddtree_on
from sglang.srt.speculative.ddtree.published import spec


def step_slots() -> int:
    """Slots that stand for one step where SGLang reserves two of them.

    The step in flight commits a block at most, whatever it verifies: a path has no more nodes. The next one begins
    behind that, and writes a block or the widest tree.
    """
    return -(-(draft_width() + largest_width(spec())) // 2)


def reserved_slots(page_size: int) -> int:
    """Slots that a request may hold beyond its committed tokens, with what its last page has left."""
    return 2 * step_slots() + page_size - 1


def row_headroom(extra: int, page_size: int) -> int:
    """Columns that a `req_to_token` row needs beyond the context length.

    SGLang adds one verify width where pages hold one slot, but maps more: near the context's end the rest would be
    written into the next request's row.

    Args:
        extra: Columns that SGLang adds.
        page_size: Slots of a page.
    """
    return max(extra, reserved_slots(page_size)) if is_ddtree_on() else extra


def most_logits_rows(model_runner: Any) -> int:
    """Rows of the logits buffer that the graphs of all lanes share.

    Args:
        model_runner: The target's.
    """
    from sglang.srt.model_executor.runner.base_cuda_graph_runner import get_batch_sizes_to_capture

    widths = {*(budget + 1 for budget in budgets(spec())), largest_width(spec())}
    return max(max(get_batch_sizes_to_capture(model_runner, width)[0]) * width for width in widths)


def verify_mask_with_room(mask: Any, width: int) -> Any:
    """SGLang's `VerifyMask` with rows that hold a prefix a block past the context, or `mask` as it was.

    A step is launched before the one before it is counted, so the last steps of a request may run past its end; the
    mask would be written behind its buffer.

    Args:
        mask: As SGLang has made it, for rows of context + width, or None.
        width: Nodes per request.
    """
    if mask is None or not is_ddtree_on():
        return mask
    cells = mask.buffer.numel() + mask.max_bs * width * draft_width()
    return msgspec.structs.replace(mask, buffer=mask.buffer.new_zeros(cells))
