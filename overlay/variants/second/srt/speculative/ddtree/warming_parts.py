# SPDX-License-Identifier: Apache-2.0
"""What a step of the second worker launches that the first one's does not."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import clamp_position
from sglang.srt.speculative.ddtree.accept import Acceptance
from sglang.srt.speculative.ddtree.kv_move import move_to_front
from sglang.srt.speculative.ddtree.slots import verify_slots
from sglang.srt.speculative.ddtree.tree import Tree


#: Whether a step of this generation has grammars, for which trees are linked.
DRAFTS_GRAMMARS = True


def warm_commit(worker: Any, tree: Tree, acceptance: Acceptance) -> None:
    """Commit roots of nobody: slots that are all 0, which no request has, out of a table of its own."""
    batch, width = tree.tokens.shape
    table = tree.tokens.new_zeros((batch, width + 1), dtype=torch.int32)
    rows = torch.arange(batch, device=table.device)
    slots = verify_slots(table, rows, torch.ones_like(rows), width)
    if width == 1:
        clamp_position(torch.ones_like(rows))  # in plain decoding SGLang finds positions by a kernel that it compiles
        return
    move_to_front(worker._pool, slots, acceptance.path, acceptance.commit_lens)
