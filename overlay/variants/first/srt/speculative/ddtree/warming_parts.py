# SPDX-License-Identifier: Apache-2.0
"""What a step of the first worker launches that the second one's does not."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import clamp_position
from sglang.srt.speculative.ddtree.accept import Acceptance
from sglang.srt.speculative.ddtree.draft_slots import draft_slots
from sglang.srt.speculative.ddtree.kv_move import move_to_front
from sglang.srt.speculative.ddtree.placing import place
from sglang.srt.speculative.ddtree.tree import Tree


#: Whether a step of this generation has grammars, for which trees are linked.
DRAFTS_GRAMMARS = False


def warm_commit(worker: Any, tree: Tree, acceptance: Acceptance) -> None:
    """Commit roots of nobody: slots that are all 0, which no request has, in a table of its own."""
    slots = torch.zeros_like(tree.tokens)
    pool = worker._moving_pool
    draft_slots(slots, acceptance, moved=pool is not None)
    lens, rows = torch.ones_like(acceptance.bonus), torch.arange(len(slots), device=slots.device)
    if tree.width == 1:
        clamp_position(lens)  # in plain decoding SGLang finds positions by a kernel that it compiles
    if pool is not None:
        move_to_front(pool, slots, acceptance.path, acceptance.commit_lens)
    else:
        place(slots, acceptance, slots.new_zeros((len(slots), 2), dtype=torch.int32), rows, lens)
