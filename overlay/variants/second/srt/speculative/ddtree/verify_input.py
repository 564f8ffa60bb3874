# SPDX-License-Identifier: Apache-2.0
"""What goes into one tree verify step: slots, mask, and the target's batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.ddtree.args import draft_width
from sglang.srt.speculative.ddtree.plans import plan_fields
from sglang.srt.speculative.ddtree.reserved import reserved_lens
from sglang.srt.speculative.ddtree.tree import Tree
from sglang.srt.speculative.dflash_info import DFlashVerifyInput


if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2


@dataclass
class DDTreeVerifyInput(DFlashVerifyInput):
    """A DFLASH verify input whose tokens are the nodes of a tree: row i is node i, at the position prefix + depth."""

    tree: Tree | None = None


def prepare_verify(
    batch: ScheduleBatch,
    target_worker: TpModelWorker,
    draft_input: DFlashDraftInputV2,
    tree: Tree,
    *,
    slots: torch.Tensor,
    custom_mask: torch.Tensor,
) -> ForwardBatch:
    """The target's verify batch, its attention metadata written already.

    Args:
        slots: Slot of each node, int64 [bs, W].
        custom_mask: The ancestor mask, flat.
    """
    lens, total = reserved_lens(draft_input)
    width = slots.shape[1]
    verify_input = DDTreeVerifyInput(
        draft_token=tree.tokens.reshape(-1),
        positions=tree.positions.reshape(-1),
        draft_token_num=width,
        custom_mask=custom_mask,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        retrieve_next_token=tree.first_child,
        retrieve_next_sibling=tree.next_sibling,
        tree=tree,
        **plan_fields(target_worker, batch, lens, slots),
    )
    batch.out_cache_loc = slots.reshape(-1)
    # The host's bound of each length, for what is planned on the host. Where its lengths lag (0.5.14) a step of another
    # lane may be in flight, which commits a block at most.
    exact_lens, exact_total = batch.seq_lens_cpu, batch.seq_lens_sum
    if exact_lens is None:
        batch.seq_lens_cpu, batch.seq_lens_sum = lens, total
    else:
        batch.seq_lens_cpu = exact_lens + max(width, draft_width())
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
    verify_batch, _ = verify_input.prepare_for_verify(batch, target_worker)
    batch.seq_lens_cpu, batch.seq_lens_sum = exact_lens, exact_total
    return verify_batch
