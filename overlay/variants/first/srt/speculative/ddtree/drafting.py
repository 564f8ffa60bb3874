# SPDX-License-Identifier: Apache-2.0
"""The draft of a step in the first worker, launched without asking the device for a number.

SGLang's own drafting reads the lengths back twice a step, which the host knows, and takes slots of its own for the
block. Here the block's KV goes where the tree's will be: nobody reads it once the block is drafted, and the KV of what
is committed is written anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.common import alloc_token_slots
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.speculative.ddtree.draft_pools import draft_pools
from sglang.srt.speculative.ddtree.plain_step import BONUS
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import assign_req_to_token_pool_func


if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch


@dataclass(frozen=True)
class Draft:
    """A drafted block of each request; S is the block size."""

    #: Hidden states, [bs, S, hidden]; row i is about the i-th token after the bonus token.
    draft_hidden: torch.Tensor
    #: The drafter's input, int64 [bs, S]; column 0 is the bonus token.
    block_ids: torch.Tensor
    #: The slots to verify the tree in, in the scheduler's table already, int64 [bs * W]; None where the tree is
    #: narrower than the block: the block's slots are given back then.
    slots: torch.Tensor | None


class BlockDrafter:
    """Drafts blocks, with pages of one slot and a drafter that reads the target's own table.

    Args:
        worker: DFLASH's; its draft model, buffers and runner are used.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        #: The worker's buffer whose columns behind the first hold the mask token; it takes a larger one now and then.
        self._masked: torch.Tensor | None = None

    @classmethod
    def of(cls, worker: Any) -> BlockDrafter | None:
        """A worker's; None where SGLang's drafting is left alone: larger pages, a windowed draft with its own table."""
        return cls(worker) if int(worker.page_size) == 1 and not worker.use_compact_draft_cache else None

    def draft(self, batch: ScheduleBatch, draft_input: Any, width: int) -> Draft:
        """Draft a block of each request, whose draft KV is complete.

        Args:
            batch: Decodes.
            draft_input: Its draft state.
            width: Nodes of the tree that is verified next.

        Raises:
            RuntimeError: There are no slots left, or the drafter gave no hidden states.
        """
        worker, requests, block_size = self._worker, len(batch.reqs), int(self._worker.block_size)
        model_runner, allocator = worker.draft_model_runner, batch.token_to_kv_pool_allocator
        block_ids = self._block_ids(requests)
        block_ids[:, 0].copy_(getattr(draft_input, BONUS))
        embeddings = worker.target_worker.model_runner.model.get_input_embeddings()(block_ids)
        positions = worker._draft_block_positions_buf[:requests]
        torch.add(batch.seq_lens.unsqueeze(1), worker._block_pos_offsets, out=positions)

        held, state = max(width, block_size), None
        if width >= block_size:
            slots = alloc_token_slots(batch.tree_cache, requests * held)
        else:
            # Without eviction, which `restore_state` would undo by half.
            state, slots = allocator.backup_state(), allocator.alloc(requests * held)
            if slots is None:
                raise RuntimeError(f"DDTREE found no {requests * held} KV slots to draft in.")
        table, rows = batch.req_to_token_pool.req_to_token, batch.req_pool_indices
        assign_req_to_token_pool_func(rows, table, batch.seq_lens, batch.seq_lens + held, slots, requests)
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=requests,
            input_ids=block_ids.flatten(),
            req_pool_indices=rows,
            seq_lens=draft_input.draft_seq_lens,
            out_cache_loc=slots.view(requests, held)[:, :block_size].reshape(-1),
            # The batch's own sum is not there behind every change of the batch, in 0.5.13.
            seq_lens_sum=sum(batch.seq_lens_cpu.tolist()),
            seq_lens_cpu=batch.seq_lens_cpu,
            positions=positions.reshape(-1),
            input_embeds=embeddings.view(-1, embeddings.shape[-1]),
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
            spec_info=worker._draft_block_spec_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            **draft_pools(model_runner),
        )
        with torch.inference_mode():
            hidden = model_runner.forward(forward_batch).logits_output.hidden_states
        if hidden is None:
            raise RuntimeError("DDTREE requires the drafter's hidden states, but got None.")
        if state is not None:
            allocator.restore_state(state)
        return Draft(hidden.view(requests, block_size, -1), block_ids, None if state is not None else slots)

    def _block_ids(self, requests: int) -> torch.Tensor:
        """The drafter's input but for the bonus tokens, int64 [bs, S]."""
        self._worker._ensure_draft_block_buffers(requests)
        ids: torch.Tensor = self._worker._draft_block_ids_buf
        if ids is not self._masked:
            ids.fill_(int(self._worker._mask_token_id))
            self._masked = ids
        return ids[:requests]
