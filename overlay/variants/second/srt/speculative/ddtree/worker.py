# SPDX-License-Identifier: Apache-2.0
"""The DDTREE worker of SGLang's second generation of DFLASH workers, with or without overlap scheduling.

It is the DFLASH worker up to the drafter's hidden states; from there on a step verifies a tree instead of a chain, and
hands back what DFLASH hands back. The scheduler reserves slots ahead, so a step allocates and frees nothing.

What happens from the target's forward on is in `judging`; steps that draft nothing are in `plain_steps`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.speculative.ddtree import stages
from sglang.srt.speculative.ddtree.accept import Acceptance
from sglang.srt.speculative.ddtree.args import draft_width
from sglang.srt.speculative.ddtree.calibration import Calibration
from sglang.srt.speculative.ddtree.calibration_report import tell_of
from sglang.srt.speculative.ddtree.captured_head import CapturedHead, by_position, draft_rows
from sglang.srt.speculative.ddtree.choosing import NONE, TREE, Choosing, tree_shape
from sglang.srt.speculative.ddtree.commit import committed_rows
from sglang.srt.speculative.ddtree.draft_arguments import draft_arguments
from sglang.srt.speculative.ddtree.draft_head import Choices, DraftHead
from sglang.srt.speculative.ddtree.draft_kv_graphs import DraftKVGraphs, capture_draft_kv
from sglang.srt.speculative.ddtree.draft_scope import draft_scope
from sglang.srt.speculative.ddtree.drafter_weights import DrafterWeights
from sglang.srt.speculative.ddtree.gates import check_model_runner
from sglang.srt.speculative.ddtree.judging import Judging
from sglang.srt.speculative.ddtree.kv_move import movable_pool
from sglang.srt.speculative.ddtree.lanes import Lanes
from sglang.srt.speculative.ddtree.plain_steps import PlainSteps
from sglang.srt.speculative.ddtree.published import spec
from sglang.srt.speculative.ddtree.ready import log_ready
from sglang.srt.speculative.ddtree.recurrent import is_recurrent
from sglang.srt.speculative.ddtree.report import name_replica
from sglang.srt.speculative.ddtree.reserved import reserved_lens
from sglang.srt.speculative.ddtree.slots import verify_slots
from sglang.srt.speculative.ddtree.step_mask import StepMask
from sglang.srt.speculative.ddtree.target_backend import check_target
from sglang.srt.speculative.ddtree.targets import TargetChooser
from sglang.srt.speculative.ddtree.trace import is_tracing
from sglang.srt.speculative.ddtree.tree import build_tree, is_exact
from sglang.srt.speculative.ddtree.verify_input import prepare_verify
from sglang.srt.speculative.ddtree.warming import warm_up
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2


if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2


def create_ddtree_worker() -> type[DDTreeWorker]:
    """The worker class for `SpeculativeAlgorithm.create_worker`."""
    return DDTreeWorker


class DDTreeWorker(Judging, PlainSteps, DrafterWeights, DFlashWorkerV2):
    """Drafts a block with DFlash, verifies a tree of it.

    Args:
        server_args: The target's. The DFLASH worker and its draft runner are built where the block is the only width.
    """

    def __init__(self, *, server_args: ServerArgs, target_worker: TpModelWorker, **kwargs: Any) -> None:
        check_model_runner(target_worker.model_runner)
        with draft_scope():
            super().__init__(server_args=draft_arguments(server_args), target_worker=target_worker, **kwargs)
        self.topk_cap = spec().speculative_ddtree_topk_cap
        self.chain_seed = bool(spec().speculative_ddtree_chain_seed)
        self._targets = TargetChooser(self.model_runner.sampler, get_tp_group())
        self._draft_head = DraftHead.of(self.model_runner.model, get_tp_group())
        self._captured_head: CapturedHead | None = None
        wanted = str(spec().speculative_ddtree_calibration)
        device, positions = self.model_runner.device, draft_width() - 1
        self._calibration = Calibration.of(wanted, positions, device, topk_cap=self.topk_cap)
        name_replica(self)
        tell_of(self._calibration, get_tp_group().rank_in_group)
        self._draft_kv_graphs: DraftKVGraphs | None = None
        self._is_recurrent = is_recurrent(self.model_runner)
        self._is_first_rank = get_tp_group().rank_in_group == 0
        # DFLASH's note on its own chain verify would be untrue here.
        self._warned_sampling_fallback = True
        heads = ("selector", "lilicorr")
        if any(getattr(self, head, None) is not None for head in heads) or getattr(self, "_is_domino", False):
            raise ValueError(
                "DDTREE does not draft with a head that chooses a position's token by the one before it (selector, "
                "Domino, LiLiCorr): a tree is made of each position's own probabilities. Use --speculative-algorithm "
                "DFLASH."
            )
        if int(self.block_size) != draft_width():
            raise RuntimeError(
                f"DDTREE: the drafter was built for blocks of {self.block_size} tokens instead of {draft_width()}"
            )

    def init_attention_backends(self) -> None:
        """Build the draft's backends; the target's pools and backends are there by now.

        Raises:
            ValueError: The target cannot verify a tree.
        """
        check_target(self.model_runner)
        self._pool = movable_pool(self.model_runner.token_to_kv_pool)
        with draft_scope():
            super().init_attention_backends()
        self._lanes = Lanes(self.model_runner, self.draft_model_runner)
        self._choosing = Choosing(self._lanes, spec())
        log_ready(self, self._lanes)

    def init_cuda_graphs(self) -> None:
        """Capture the draft's graphs, of the block's width, the lanes', and the draft KV's."""
        with draft_scope():
            super().init_cuda_graphs()
        self._lanes.capture()
        self._draft_kv_graphs = capture_draft_kv(self, self._lanes.batch_sizes)
        self._capture_root_kv()
        self._choosing.ready(model_runner=self.model_runner, draft_runner=self.draft_model_runner, group=get_tp_group())
        warm_up(self)

    def forward_batch_generation(self, batch: ScheduleBatch, *args: Any, **kwargs: Any) -> GenerationBatchResult:
        """A step as the DFLASH worker runs it."""
        forward = super().forward_batch_generation
        if not self._choosing.begin(batch):
            stages.interrupt()
        else:
            stages.mark(stages.DRAFT, batch=len(batch.reqs))
            if self._choosing.choose().shape == NONE:
                forward = self._decode_plainly
        result = forward(batch, *args, **kwargs)
        self._choosing.end()
        return result

    def clear_cache_pool(self) -> None:
        """The cache is flushed, as after every weight update: the exponents start anew."""
        super().clear_cache_pool()
        self._calibration.reset()

    def _maybe_build_draft_sampler(self) -> CapturedHead:
        """What SGLang captures behind the draft: the head, with the choices that the widest lane's trees need."""
        _, topk, _ = tree_shape(self._lanes.widths[-1], TREE, self.topk_cap, chain_seed=self.chain_seed)
        self._captured_head = CapturedHead(
            self._draft_head,
            block_size=int(self.block_size),
            topk=topk,
            exponents=self._calibration.exponents,
            moments=self._calibration.is_fitted,
        )
        return self._captured_head

    def prewarm_sampling(self) -> Any:
        """Rehearse nothing: from SGLang 0.5.20 on DFLASH runs its sampled verify here, gigabytes that no step needs."""
        # Releases before that have no such rehearsal, and never call this.
        return self.model_runner.prewarm_sampling() if hasattr(self.model_runner, "prewarm_sampling") else None

    def _defer_target_verify_gather(self) -> None:
        """No verify logits that stay sharded over the vocabulary: the accept walk reads whole rows."""

    def _verify_tree(
        self,
        batch: ScheduleBatch,
        *,
        draft_input: DFlashDraftInputV2,
        draft_hidden: torch.Tensor,
        block_ids: torch.Tensor,
        block_positions: torch.Tensor,
        block_slots: torch.Tensor,
        on_publish: Callable[[torch.Tensor], None] | None,
        grammar_barrier: Callable[[], None] | None = None,
    ) -> GenerationBatchResult:
        """Turn a drafted block into a tree, verify it and commit a path of it: the rest of a DFLASH decode step.

        Args:
            draft_input: The batch's draft state.
            draft_hidden: Draft hidden states, [bs * block, hidden]; row i of a block is about the i-th token after the
                bonus token.
            block_ids: Draft input tokens, int64 [bs, block]; column 0 is the bonus token.
            block_positions: Position of each draft input token, int64 [bs * block].
            block_slots: Slot of each, int64 [bs, block].
            on_publish: Told the new lengths as soon as they are known.
            grammar_barrier: Brings the requests' grammars up to date with the step before this one.

        Returns:
            Tokens with a stride of the block size, commit lengths, lengths and draft state of the next step.
        """
        prefix_lens, block_size = batch.seq_lens, int(self.block_size)
        width, shape = self._choosing.choose()
        self._lanes.use(width)
        budget, topk, chain_seed = tree_shape(
            self._choosing.grown_width(), shape, self.topk_cap, chain_seed=self.chain_seed
        )
        stages.mark(stages.HEAD)
        choices = self._choices(draft_hidden, topk)
        stages.mark(stages.TREE)
        # The scheduler reserved as many slots of each request as a mask row can have columns.
        mask = StepMask.of(self.model_runner.attn_backend, prefix_lens, width * reserved_lens(draft_input)[1])
        tree = build_tree(
            block_ids[:, 0],
            *by_position(choices, block_size),
            budget,
            width=width,
            prefix_lens=prefix_lens,
            chain_seed=chain_seed,
            # Recurrent layers read the links from every verify input; never a chain now and a tree then, since a CUDA
            # graph is captured for one of them.
            links=self._is_recurrent or batch.has_grammar,
            mask=mask.tails,
        )
        stages.mark(stages.MASK, width=width, shape=shape)
        slots = verify_slots(
            self.model_runner.req_to_token_pool.req_to_token, batch.req_pool_indices, prefix_lens, width
        )
        return self._judge(
            batch,
            tree,
            lambda: prepare_verify(
                batch, self.target_worker, draft_input, tree, slots=slots, custom_mask=mask.written(tree, prefix_lens)
            ),
            draft_input=draft_input,
            slots=slots,
            on_publish=on_publish,
            grammar_barrier=grammar_barrier,
            write_draft_kv=lambda hidden, acceptance: self._write_draft_kv(
                hidden, acceptance, block_slots, block_positions
            ),
            choices=choices,
            exact=is_exact(tree, by_position(choices, block_size)[0], chain_seed=chain_seed) if is_tracing() else None,
        )

    def _write_draft_kv(
        self, hidden_states: torch.Tensor, acceptance: Acceptance, slots: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Draft KV of the committed tokens: by a replayed graph, if one was captured for so many requests.

        Args:
            hidden_states: Of all nodes, [bs * W, features].
            slots: Of the block's tokens, int64 [bs, block].
            positions: Of them, int64 [bs * block].
        """
        graphs = self._draft_kv_graphs
        if graphs is not None and graphs.replay(hidden_states, acceptance, slots):
            return
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=committed_rows(hidden_states, acceptance),
            cache_loc=slots.reshape(-1),
            cache_loc_2d=slots,
            positions=positions,
            commit_lens=acceptance.commit_lens,
        )

    def _choices(self, draft_hidden: torch.Tensor, topk: int) -> Choices:
        """The drafter's best tokens of each position: out of the draft's CUDA graph, if it was replayed."""
        choices = None if self._captured_head is None else self._captured_head.choices_of(draft_hidden)
        if choices is not None:
            return choices
        rows = draft_rows(draft_hidden, int(self.block_size))
        fit = self._calibration
        return self._draft_head.top_log_probs(rows, topk, fit.exponents, moments=fit.is_fitted)
