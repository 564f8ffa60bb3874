# SPDX-License-Identifier: Apache-2.0
"""The second half of a step, the same for a tree and for a root alone: the target's forward, accept walk, commit.

With overlap scheduling the scheduler goes on as soon as the target's forward has been launched, and may rewrite what it
shares with the worker: the request-to-token table, the batch, the penalties. Whatever a step needs of them is copied to
tensors of its own before that launch. Nothing in a step waits for the device.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.speculative.ddtree import stages
from sglang.srt.speculative.ddtree.accept import Acceptance, accept
from sglang.srt.speculative.ddtree.captured_head import by_position
from sglang.srt.speculative.ddtree.commit import rows_of_batch
from sglang.srt.speculative.ddtree.draft_state import next_draft_input
from sglang.srt.speculative.ddtree.grammar import node_grammar
from sglang.srt.speculative.ddtree.kv_move import move_to_front
from sglang.srt.speculative.ddtree.logprobs import add_logprobs
from sglang.srt.speculative.ddtree.penalties import root_penalties
from sglang.srt.speculative.ddtree.targets import adjust_without_penalties, roots_only
from sglang.srt.speculative.ddtree.trace import is_tracing, trace_step
from sglang.srt.speculative.spec_utils import commit_mamba_states_after_verify


if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.speculative.ddtree.draft_head import Choices
    from sglang.srt.speculative.ddtree.tree import Tree
    from sglang.srt.speculative.ddtree.worker import DDTreeWorker
    from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2


class Judging:
    """What the worker does with a tree, mixed into it."""

    def _judge(
        self: DDTreeWorker,
        batch: ScheduleBatch,
        tree: Tree,
        prepare: Callable[[], ForwardBatch],
        *,
        draft_input: DFlashDraftInputV2,
        slots: torch.Tensor,
        on_publish: Callable[[torch.Tensor], None] | None,
        grammar_barrier: Callable[[], None] | None,
        write_draft_kv: Callable[[torch.Tensor, Acceptance], None],
        choices: Choices | None = None,
        exact: torch.Tensor | None = None,
    ) -> GenerationBatchResult:
        """Let the target run on a tree and commit a path of it.

        Args:
            prepare: Makes the target's batch, after what the scheduler may rewrite has been copied.
            slots: Of the nodes, int64 [bs, W].
            write_draft_kv: Takes the hidden states of all nodes, [bs * W, features].
            choices: What the tree was built from; None for a root without a draft.
            exact: `tree.is_exact`, for a trace.
        """
        prefix_lens, sampling_info, block_size = batch.seq_lens, batch.sampling_info, int(self.block_size)
        penalties, grammar = root_penalties(draft_input, tree.tokens[:, 0], batch.reqs), node_grammar(batch, tree)
        forward_batch = prepare()
        stages.mark(stages.VERIFY)
        output = self.target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
        )
        stages.mark(stages.ACCEPT)
        logits_output = output.logits_output
        logits = logits_output.next_token_logits
        if penalties is not None:
            penalties.apply(logits.view(-1, tree.width, logits.shape[1])[:, 0])
        constrain = None if grammar is None else partial(grammar.apply, batch=batch, barrier=grammar_barrier)
        adjust_without_penalties(logits, sampling_info, tree.width, constrain)
        penalised = None if penalties is None else penalties.requests
        root_only = roots_only(sampling_info, penalised)
        acceptance = accept(
            tree,
            self._targets.choose(logits, sampling_info, tree.positions.reshape(-1), tree.width),
            prefix_lens=prefix_lens,
            block_size=block_size,
            root_only=root_only,
        )
        if choices is not None:
            self._calibration.observe(choices, acceptance, root_only)
            self._choosing.count(tree, acceptance, by_position(choices, block_size))
        stages.mark(stages.COMMIT)
        if tree.width > 1:  # plain decoding leaves everything in its place
            move_to_front(self._pool, slots, acceptance.path, acceptance.commit_lens)
            if self._is_recurrent:
                rows = rows_of_batch(acceptance.path, tree.width)
                commit_mamba_states_after_verify(self.target_worker, batch, acceptance.commit_lens, rows, tree.width)
        if on_publish is not None:
            on_publish(acceptance.new_seq_lens)

        if logits_output.hidden_states is None:
            raise RuntimeError("DDTREE verify requires the target's hidden states, but got None.")
        write_draft_kv(logits_output.hidden_states, acceptance)
        # Nobody reads them any more, and with overlap scheduling they would be copied to the host.
        logits_output.hidden_states = None
        add_logprobs(batch, logits_output, acceptance)
        if is_tracing() and self._is_first_rank:
            committed, rids = acceptance.commit_lens.tolist(), [req.rid for req in batch.reqs]
            trace_step(rids, prefix_lens.tolist(), tree, acceptance, committed, exact=exact)
        self._lanes.rest()
        stages.mark(stages.REST)
        return GenerationBatchResult(
            logits_output=logits_output,
            next_token_ids=acceptance.tokens.reshape(-1),
            accept_lens=acceptance.commit_lens,
            can_run_cuda_graph=output.can_run_cuda_graph,
            next_draft_input=next_draft_input(self, draft_input, acceptance.bonus, acceptance.new_seq_lens),
            speculative_num_draft_tokens=block_size,
            new_seq_lens=acceptance.new_seq_lens,
        )
