# SPDX-License-Identifier: Apache-2.0
"""One tree verify step of a batch: the mask going in, acceptance and commit coming out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.speculative.ddtree.accept import Acceptance, accept
from sglang.srt.speculative.ddtree.counting import count_step
from sglang.srt.speculative.ddtree.finishing import finish_if_due
from sglang.srt.speculative.ddtree.kv_move import move_to_front
from sglang.srt.speculative.ddtree.targets import TargetChooser, adjust_logits, count_roots, roots_only
from sglang.srt.speculative.ddtree.trace import trace_step
from sglang.srt.speculative.ddtree.tree import Tree
from sglang.srt.speculative.ddtree.tree_mask import verify_mask
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.spec_utils import assign_req_to_token_pool_func


if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool


@dataclass
class DDTreeVerifyInput(DFlashVerifyInput):
    """A DFLASH verify input whose tokens are the nodes of a tree.

    Row i of a request is node i: its slot is prefix + i, its position prefix + depth. `DFlashVerifyInput` allocates the
    slots; the mask, the acceptance and the commit are the tree's.
    """

    tree: Tree | None = None
    targets: TargetChooser | None = None
    #: The pool whose KV moves at commit; needed when pages are larger than one slot.
    pool: MHATokenToKVPool | None = None
    #: Whether this process writes the trace: one of the tensor-parallel ranks.
    traced: bool = False
    #: For the trace: whether a top-k cap can be shown to have changed nothing, bool [bs].
    exact: torch.Tensor | None = None
    #: After `verify`: the last node each request committed, int64 [bs].
    last_nodes: torch.Tensor | None = None
    #: After `verify`: node at each step of the committed path, int64 [bs, P].
    path: torch.Tensor | None = None

    def prepare_for_verify(self, batch: ScheduleBatch, page_size: int, *, build_custom_mask: bool = True) -> None:
        """Allocate a slot per node and build the ancestor mask; a tree is never verified without one."""
        super().prepare_for_verify(batch, page_size, build_custom_mask=False)
        if batch.forward_mode.is_idle():
            return
        assert self.tree is not None
        self.custom_mask = verify_mask(self.tree, batch.seq_lens_cpu.tolist())

    def verify(
        self, *, batch: ScheduleBatch, logits_output: LogitsProcessorOutput, page_size: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
        """Accept a path of each tree and commit it.

        Returns:
            What `DFlashVerifyInput.verify` returns: current tokens int64 [bs], commit lengths int32 [bs], hidden
            states of the committed nodes [sum of commit lengths, features], accepted draft tokens per request.
        """
        if batch.forward_mode.is_idle():
            empty = torch.empty((0,), dtype=torch.int64, device=batch.device)
            return empty, empty.to(torch.int32), empty, []
        assert self.tree is not None
        assert self.targets is not None
        width = self.draft_token_num
        logits = logits_output.next_token_logits
        penalised = count_roots(
            batch.sampling_info, self.tree.tokens[:, 0], [req.sampling_params for req in batch.reqs]
        )
        if batch.sampling_info is not None:
            adjust_logits(logits, batch.sampling_info, width)
        target_tokens = self.targets.choose(logits, batch.sampling_info, self.positions, width)
        acceptance = accept(
            self.tree,
            target_tokens,
            prefix_lens=batch.seq_lens,
            block_size=self.tree.max_depth + 1,
            root_only=roots_only(batch.sampling_info, penalised),
        )

        prefix_lens = batch.seq_lens_cpu.tolist()
        current_tokens, committed = self._emit(batch, acceptance)
        if self.traced:
            rids = [req.rid for req in batch.reqs]
            trace_step(rids, prefix_lens, self.tree, acceptance, committed, exact=self.exact)

        commit_lens = torch.tensor(committed, dtype=torch.int32, device=logits.device)
        nodes = self._committed_nodes(acceptance, commit_lens)
        if page_size == 1:
            self._keep_where_they_are(batch, nodes)
        else:
            self._keep_in_front(batch, commit_lens, page_size)
        self._advance(batch, commit_lens, committed)
        if logits_output.hidden_states is None:
            raise RuntimeError("DDTREE verify requires the target's hidden states, but got None.")
        hidden_states = logits_output.hidden_states[nodes]
        # Spec-v1 decoding has no reader for these; DFLASH drops them as well.
        logits_output.hidden_states = None
        tokens = torch.tensor(current_tokens, dtype=torch.int64, device=logits.device)
        return tokens, commit_lens, hidden_states, [count - 1 for count in committed]

    def _emit(self, batch: ScheduleBatch, acceptance: Acceptance) -> tuple[list[int], list[int]]:
        """Append accepted tokens and bonus to each request until it finishes: (current token, tokens appended) of each.

        k appended tokens commit k nodes: the root and all but the last of them; the last is the next round's root.
        """
        assert self.tree is not None
        path_tokens = self.tree.tokens.gather(1, acceptance.path.clamp(min=0))
        packed = torch.cat(
            [path_tokens[:, 1:], acceptance.accept_lens.unsqueeze(1), acceptance.bonus.unsqueeze(1)], dim=1
        )
        current_tokens, committed = [], []
        think_end_id = batch.model_config.think_end_id
        for req, (*drafts, accept_len, bonus) in zip(batch.reqs, packed.tolist(), strict=True):
            appended = 0
            for token in [*drafts[:accept_len], bonus]:
                req.output_ids.append(token)
                appended += 1
                if req.require_reasoning and think_end_id is not None:
                    req.update_reasoning_tokens(token, think_end_id)
                finish_if_due(req)
                if req.finished():
                    break
            count_step(req, appended - 1)
            current_tokens.append(req.output_ids[-1])
            committed.append(appended)
        return current_tokens, committed

    def _committed_nodes(self, acceptance: Acceptance, commit_lens: torch.Tensor) -> torch.Tensor:
        """Row of each committed node in the flat batch, request by request, int64 [sum of commit_lens]."""
        path = acceptance.path
        self.path = path
        self.last_nodes = path.gather(1, commit_lens.long().unsqueeze(1) - 1).squeeze(1)
        steps = torch.arange(path.shape[1], device=path.device)
        rows = path + torch.arange(path.shape[0], device=path.device).unsqueeze(1) * self.draft_token_num
        return rows[steps < commit_lens.unsqueeze(1)]

    def _keep_where_they_are(self, batch: ScheduleBatch, nodes: torch.Tensor) -> None:
        """Keep the committed nodes' slots in path order and free all others: with page size 1 no KV moves."""
        kept = torch.zeros_like(batch.out_cache_loc, dtype=torch.bool)
        kept[nodes] = True
        batch.token_to_kv_pool_allocator.free(batch.out_cache_loc[~kept])
        batch.out_cache_loc = batch.out_cache_loc[nodes]

    def _keep_in_front(self, batch: ScheduleBatch, commit_lens: torch.Tensor, page_size: int) -> None:
        """Move the committed nodes' KV to the first slots of each request, and free the pages behind them.

        The slots of a page that is partly used stay the request's: its next step writes on from there.
        """
        assert self.pool is not None
        assert self.path is not None
        slots = batch.out_cache_loc.view(-1, self.draft_token_num)
        move_to_front(self.pool, slots, self.path, commit_lens)
        places = torch.arange(self.draft_token_num, device=slots.device)
        positions = batch.seq_lens.unsqueeze(1) + places
        first_unused_page = -(-(batch.seq_lens + commit_lens) // page_size)
        batch.token_to_kv_pool_allocator.free(slots[positions // page_size >= first_unused_page.unsqueeze(1)])
        batch.out_cache_loc = slots[places < commit_lens.unsqueeze(1)]

    def _advance(self, batch: ScheduleBatch, commit_lens: torch.Tensor, committed: list[int]) -> None:
        """Map the committed slots, which `batch.out_cache_loc` holds now, and advance the batch's lengths."""
        for req, count in zip(batch.reqs, committed, strict=True):
            req.kv_committed_len += count
            req.kv_allocated_len = req.kv_committed_len
        lengths = commit_lens.to(batch.seq_lens.dtype)
        assign_req_to_token_pool_func(
            batch.req_pool_indices,
            batch.req_to_token_pool.req_to_token,
            batch.seq_lens,
            batch.seq_lens + lengths,
            batch.out_cache_loc,
            len(batch.reqs),
        )
        batch.seq_lens.add_(lengths)
        batch.seq_lens_cpu.add_(torch.tensor(committed, dtype=batch.seq_lens_cpu.dtype))
        batch.seq_lens_sum += sum(committed)


def recurrent_steps(
    verify_input: DDTreeVerifyInput, batch: Any, seq_lens_before: torch.Tensor, interval: int | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Which node's recurrent state to commit, and which to keep for the prefix cache.

    Returns:
        The last committed node, int64 [bs]; and, when the batch tracks states, the node at the last multiple of
        `interval` that the step crossed, or -1, int64 [bs].
    """
    assert verify_input.last_nodes is not None
    assert verify_input.path is not None
    if batch.mamba_track_indices is None or interval is None:
        return verify_input.last_nodes, None
    crossed = seq_lens_before // interval != batch.seq_lens // interval
    step = (batch.seq_lens // interval * interval - seq_lens_before - 1).clamp(min=0).long()
    step = step.clamp(max=verify_input.path.shape[1] - 1)
    return verify_input.last_nodes, torch.where(crossed, verify_input.path.gather(1, step.unsqueeze(1)).squeeze(1), -1)
