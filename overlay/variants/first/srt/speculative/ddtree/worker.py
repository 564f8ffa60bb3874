# SPDX-License-Identifier: Apache-2.0
"""The DDTREE worker of SGLang's first generation of DFLASH workers (no overlap scheduling).

Prefill and the order of a decode step are the DFLASH worker's. The drafted block becomes a tree instead of a chain, and
recurrent state is committed by node. So that a step waits for the device but once, what lies around the tree is ours as
well: the block is drafted by `drafting`, where pages and drafter allow it, the draft KV of what was accepted is written
by `draft_kv`, and tokens are appended to their requests by `emitting`. A step may also draft nothing.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.speculative.ddtree import stages
from sglang.srt.speculative.ddtree.accept import Acceptance
from sglang.srt.speculative.ddtree.args import draft_view
from sglang.srt.speculative.ddtree.calibration import Calibration
from sglang.srt.speculative.ddtree.calibration_report import tell_of
from sglang.srt.speculative.ddtree.captured_head import by_position, draft_rows
from sglang.srt.speculative.ddtree.choosing import NONE, Choosing, tree_shape
from sglang.srt.speculative.ddtree.commit import committed_rows
from sglang.srt.speculative.ddtree.draft_head import DraftHead
from sglang.srt.speculative.ddtree.draft_kv import append_draft_kv
from sglang.srt.speculative.ddtree.draft_slots import draft_slots
from sglang.srt.speculative.ddtree.drafting import BlockDrafter
from sglang.srt.speculative.ddtree.gates import check_model_runner
from sglang.srt.speculative.ddtree.host_copies import StepCopies
from sglang.srt.speculative.ddtree.kv_move import movable_pool
from sglang.srt.speculative.ddtree.lanes import Lanes
from sglang.srt.speculative.ddtree.plain_forward import plain_forward
from sglang.srt.speculative.ddtree.plain_step import BONUS, no_drafts
from sglang.srt.speculative.ddtree.ready import log_ready
from sglang.srt.speculative.ddtree.recurrent import is_recurrent
from sglang.srt.speculative.ddtree.recurrent_commit import commit_recurrent_state
from sglang.srt.speculative.ddtree.report import name_replica
from sglang.srt.speculative.ddtree.request_length import SPARE_INPUT, longest_request
from sglang.srt.speculative.ddtree.step_mask import StepMask
from sglang.srt.speculative.ddtree.target_backend import check_target
from sglang.srt.speculative.ddtree.targets import TargetChooser
from sglang.srt.speculative.ddtree.trace import is_tracing
from sglang.srt.speculative.ddtree.tree import build_tree, is_exact, root_tree
from sglang.srt.speculative.ddtree.verify_input import DDTreeVerifyInput, recurrent_steps
from sglang.srt.speculative.ddtree.warming import warm_up
from sglang.srt.speculative.dflash_worker import DFlashWorker


if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.ddtree.tree import Tree
    from sglang.srt.speculative.dflash_info import DFlashDraftInput


def create_ddtree_worker(enable_overlap: bool) -> type[DDTreeWorker]:
    """The worker class for `SpeculativeAlgorithm.create_worker`.

    Raises:
        ValueError: Overlap scheduling is on.
    """
    if enable_overlap:
        raise ValueError(
            "DDTREE does not support overlap scheduling in this SGLang release. Pass --disable-overlap-schedule."
        )
    return DDTreeWorker


class DDTreeWorker(DFlashWorker):
    """Drafts a block with DFlash, verifies a tree of it.

    Args:
        server_args: The target's arguments. The DFLASH worker and its draft runner see a view whose only width is the
        block.
    """

    def __init__(self, *, server_args: ServerArgs, target_worker: TpModelWorker, **kwargs: Any) -> None:
        check_model_runner(target_worker.model_runner)
        check_target(target_worker.model_runner)
        page_size, pool = int(server_args.page_size), target_worker.model_runner.token_to_kv_pool
        self._moving_pool = movable_pool(pool, page_size) if page_size > 1 else None
        self._is_recurrent = is_recurrent(target_worker.model_runner)
        target_worker.max_req_len = longest_request(target_worker.model_runner, int(target_worker.max_req_len))
        target_worker.max_req_input_len = target_worker.max_req_len - SPARE_INPUT
        super().__init__(server_args=draft_view(server_args), target_worker=target_worker, **kwargs)
        self.topk_cap = server_args.speculative_ddtree_topk_cap
        self.chain_seed = bool(server_args.speculative_ddtree_chain_seed)
        self._targets = TargetChooser(self.model_runner.sampler, get_tp_group())
        self._draft_head = DraftHead.of(self.model_runner.model, get_tp_group())
        wanted = str(server_args.speculative_ddtree_calibration)
        device, positions = self.model_runner.device, int(self.block_size) - 1
        self._calibration = Calibration.of(wanted, positions, device, topk_cap=self.topk_cap)
        name_replica(self)
        tell_of(self._calibration, self.tp_rank)
        self._lanes = Lanes(self.model_runner, self.draft_model_runner)
        self._lanes.capture()
        self._choosing = Choosing(self._lanes, server_args)
        self._choosing.ready(model_runner=self.model_runner, draft_runner=self.draft_model_runner, group=get_tp_group())
        self._draft_kv_written = False
        self._copies = StepCopies()
        self._drafter = BlockDrafter.of(self)
        # DFLASH's notes on its own chain verify would be untrue here.
        self._warned_sampling_fallback = True
        self._logged_first_verify = True
        warm_up(self)
        log_ready(self, self._lanes)

    def forward_batch_generation(self, batch: ScheduleBatch, **kwargs: Any) -> Any:
        """A step as the DFLASH worker runs it; whatever is not a tree verify runs on the widest lane, SGLang's own."""
        if not self._choosing.begin(batch):
            stages.interrupt()
            return super().forward_batch_generation(batch, **kwargs)
        stages.mark(stages.DRAFT, batch=len(batch.reqs))
        width, shape = self._choosing.choose()
        if shape == NONE:
            self._lanes.use(width)
            result = self._decode_plainly(batch, **kwargs)
        else:
            result = super().forward_batch_generation(batch, **kwargs)
        self._lanes.rest()
        self._choosing.end()
        stages.mark(stages.REST)
        return result

    def _decode_plainly(self, batch: ScheduleBatch, **kwargs: Any) -> GenerationBatchResult:
        """A step that drafts nothing: plain decoding of the bonus token, and draft KV of it as after any step.

        Where large batches make the target compute-bound, this can be faster than any tree.
        """
        draft_input = batch.spec_info
        self._append_target_hidden_to_draft_kv(batch, draft_input)
        tree = root_tree(getattr(draft_input, BONUS), batch.seq_lens)
        on_accepted = None if self.use_compact_draft_cache else self._write_root_kv
        verify_input = self._verify_input(tree, on_accepted=on_accepted)
        verify_input.prepare_for_verify(batch, self.page_size, build_custom_mask=False)
        # In plain decoding the lengths count the token that goes in. A batch of 0.5.13 may have no sum of them yet.
        prefix = batch.seq_lens, batch.seq_lens_cpu, sum(batch.seq_lens_cpu.tolist())
        batch.seq_lens, batch.seq_lens_cpu = batch.seq_lens + 1, batch.seq_lens_cpu + 1
        batch.seq_lens_sum = prefix[2] + len(batch.reqs)
        batch.spec_info, batch.return_hidden_states = None, False
        stages.mark(stages.VERIFY)
        output = plain_forward(self.target_worker, batch, CaptureHiddenMode.FULL, **kwargs)
        batch.seq_lens, batch.seq_lens_cpu, batch.seq_lens_sum = prefix

        batch.spec_info = verify_input
        bonus, draft_input.ctx_lens, draft_input.target_hidden, _ = verify_input.verify(
            batch=batch, logits_output=output.logits_output, page_size=self.page_size
        )
        setattr(draft_input, BONUS, bonus)
        self._append_target_hidden_to_draft_kv(batch, draft_input)
        batch.spec_info = draft_input
        return GenerationBatchResult(
            logits_output=output.logits_output,
            next_token_ids=bonus,
            can_run_cuda_graph=output.can_run_cuda_graph,
            **no_drafts(len(batch.reqs)),
        )

    def _write_root_kv(self, batch: ScheduleBatch, acceptance: Acceptance, hidden_states: torch.Tensor) -> None:
        """Draft KV of the one token of each request; otherwise as `_write_draft_kv`."""
        with torch.inference_mode():
            context = self.draft_model.project_target_hidden(hidden_states)
            longest = int(batch.seq_lens_cpu.max())
            append_draft_kv(self, context, batch.seq_lens.to(torch.int64), batch.out_cache_loc, longest=longest)
        self._draft_kv_written = True

    def clear_cache_pool(self) -> None:
        """The cache is flushed, as after every weight update: the exponents start anew."""
        super().clear_cache_pool()
        self._calibration.reset()

    def _prepare_for_speculative_decoding(self, batch: ScheduleBatch, draft_input: DFlashDraftInput) -> None:
        """Draft a block and make a tree of it: with SGLang's drafting, which calls `_prepare_tree_verify`, or ours."""
        if self._drafter is None:
            super()._prepare_for_speculative_decoding(batch, draft_input)
            return
        self._append_target_hidden_to_draft_kv(batch, draft_input)
        self._prepare_tree_verify(batch, **vars(self._drafter.draft(batch, draft_input, self._choosing.choose().width)))

    def _prepare_tree_verify(
        self, batch: ScheduleBatch, *, draft_hidden: torch.Tensor, block_ids: torch.Tensor, slots: Any = None, **_: Any
    ) -> None:
        """Turn a drafted block into the batch's tree verify input, in place of DFLASH's chain.

        Args:
            draft_hidden: Draft hidden states, [bs, block, hidden]; row i is about the i-th token after the bonus token.
            block_ids: Draft input tokens, int64 [bs, block]; column 0 is the bonus token.
            slots: Those to verify in, int64 [bs * W], in the scheduler's table already; None for slots yet to be taken.
        """
        block_size = int(self.block_size)
        width, shape = self._choosing.choose()
        self._lanes.use(width)
        budget, topk, chain_seed = tree_shape(
            self._choosing.grown_width(), shape, self.topk_cap, chain_seed=self.chain_seed
        )
        stages.mark(stages.HEAD)
        rows = draft_rows(draft_hidden, block_size)
        fit = self._calibration
        choices = self._draft_head.top_log_probs(rows, topk, fit.exponents, moments=fit.is_fitted)
        stages.mark(stages.TREE)
        log_probs, token_ids = by_position(choices, block_size)
        cells = width * (sum(batch.seq_lens_cpu.tolist()) + width * len(batch.reqs))
        mask = StepMask.of(self.model_runner.attn_backend, batch.seq_lens, cells)
        tree = build_tree(
            block_ids[:, 0],
            log_probs,
            token_ids,
            budget,
            width=width,
            prefix_lens=batch.seq_lens,
            chain_seed=chain_seed,
            # Recurrent layers read the links from every verify input; never a chain now and a tree then, since a CUDA
            # graph is captured for one of them.
            links=self._is_recurrent,
            mask=mask.tails,
        )
        stages.mark(stages.MASK, width=width, shape=shape)
        verify_input = self._verify_input(
            tree,
            observe=partial(self._calibration.observe, choices),
            # A windowed draft keeps a table of its own, which SGLang writes with the draft KV.
            on_accepted=None if self.use_compact_draft_cache else self._write_draft_kv,
            count=lambda acceptance: self._choosing.count(tree, acceptance, (log_probs, token_ids)),
            retrieve_next_token=tree.first_child,
            retrieve_next_sibling=tree.next_sibling,
            exact=is_exact(tree, log_probs, chain_seed=chain_seed) if is_tracing() else None,
        )
        if slots is None:
            verify_input.prepare_for_verify(batch, self.page_size, build_custom_mask=False)
        else:
            batch.input_ids, batch.out_cache_loc = verify_input.draft_token, slots
        verify_input.custom_mask = mask.written(tree, batch.seq_lens)
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.spec_info = verify_input
        batch.return_hidden_states = False
        stages.mark(stages.VERIFY)

    def _verify_input(self, tree: Tree, **given: Any) -> DDTreeVerifyInput:
        """The verify input of a tree, with what all of this worker's have."""
        return DDTreeVerifyInput(
            draft_token=tree.tokens.reshape(-1),
            positions=tree.positions.reshape(-1),
            draft_token_num=tree.width,
            tree=tree,
            targets=self._targets,
            copies=self._copies,
            block_size=int(self.block_size),
            pool=self._moving_pool,
            meanwhile=self._choosing.meanwhile,
            traced=self.tp_rank == 0,
            **given,
        )

    def _write_draft_kv(self, batch: ScheduleBatch, acceptance: Acceptance, hidden_states: torch.Tensor) -> None:
        """Launch the draft KV of the accepted tokens while the host does not know yet how many they are.

        A stop may cut a path afterwards. The KV behind the cut lies in slots that are free then, as the target's does.

        Args:
            hidden_states: Of all nodes, [bs * W, features].
        """
        slots = batch.out_cache_loc.view(len(batch.reqs), -1)
        with torch.inference_mode():
            context = self.draft_model.project_target_hidden(committed_rows(hidden_states, acceptance))
            append_draft_kv(
                self,
                context,
                self._draft_block_positions_buf[: len(batch.reqs)].reshape(-1),
                draft_slots(slots, acceptance, moved=self._moving_pool is not None),
                longest=max(batch.seq_lens_cpu.tolist(), default=0) + int(self.block_size) - 1,
            )
        self._draft_kv_written = True

    def _append_target_hidden_to_draft_kv(self, batch: ScheduleBatch, draft_input: DFlashDraftInput) -> None:
        """What SGLang does before a draft and after a verify: nothing is left to do where it has been done."""
        if self._draft_kv_written:
            self._draft_kv_written = False
            placed = batch.spec_info.placed
            draft_input.draft_seq_lens = batch.seq_lens.to(torch.int32) if placed is None else placed.new_lens
        elif draft_input.target_hidden.shape[0]:
            super()._append_target_hidden_to_draft_kv(batch, draft_input)

    def _update_target_mamba_state_after_verify(
        self, *, batch: ScheduleBatch, seq_lens_pre_verify: torch.Tensor, commit_lens: torch.Tensor
    ) -> None:
        """Commit the recurrent state of the last accepted node; a node's row is not its depth."""
        attn_backend = self.target_worker.model_runner.attn_backend
        if not hasattr(attn_backend, "update_mamba_state_after_mtp_verify"):
            return
        last_nodes, tracked_nodes = recurrent_steps(
            batch.spec_info, batch, seq_lens_pre_verify, self.server_args.mamba_track_interval
        )
        commit_recurrent_state(
            attn_backend,
            last_nodes=last_nodes,
            track_indices=batch.mamba_track_indices,
            tracked_nodes=tracked_nodes,
            model=self.target_worker.model_runner.model,
        )
