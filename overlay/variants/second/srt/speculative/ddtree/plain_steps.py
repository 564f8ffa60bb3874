# SPDX-License-Identifier: Apache-2.0
"""Steps that draft nothing: plain decoding of the bonus tokens, and draft KV of them as after any step.

Where large batches make the target compute-bound, this can be faster than any tree. The target decodes as it does
without speculation, in graphs and by an attention kernel of its own; only the hidden states are kept, for the drafter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.speculative.ddtree.draft_kv_graphs import DraftKVGraphs, capture_draft_kv
from sglang.srt.speculative.ddtree.draft_state import bonus_of
from sglang.srt.speculative.ddtree.plain_forward import decode_batch
from sglang.srt.speculative.ddtree.reserved import reserved_lens
from sglang.srt.speculative.ddtree.slots import verify_slots
from sglang.srt.speculative.ddtree.tree import root_tree


if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.speculative.ddtree.accept import Acceptance
    from sglang.srt.speculative.ddtree.tree import Tree
    from sglang.srt.speculative.ddtree.worker import DDTreeWorker


class PlainSteps:
    """A worker's steps without a draft; mixed into the worker, which judges and commits them as it does trees."""

    _root_kv_graphs: DraftKVGraphs | None = None

    def _capture_root_kv(self: DDTreeWorker) -> None:
        """Capture the graphs of the draft KV of such steps, where there is a lane for them."""
        lane = self._lanes.all()[0]
        if lane.width == 1:
            self._root_kv_graphs = capture_draft_kv(self, lane.batch_sizes, roots=True)

    def _decode_plainly(
        self: DDTreeWorker,
        batch: ScheduleBatch,
        on_publish: Callable[[torch.Tensor], None] | None = None,
        grammar_barrier: Callable[[], None] | None = None,
        **_: Any,
    ) -> GenerationBatchResult:
        """A step of the narrowest lane; the arguments are those of `forward_batch_generation`."""
        self._validate_phase1_sampling_support(batch)
        draft_input, prefix_lens = batch.spec_info, batch.seq_lens
        roots = bonus_of(draft_input)
        # The step before may have made them on another stream, as DFLASH notes; nothing here is a copy of them.
        for made in (prefix_lens, roots):
            made.record_stream(torch.get_device_module(made.device).current_stream())
        tree = root_tree(roots, prefix_lens, links=batch.has_grammar)
        self._lanes.use(1)
        slots = verify_slots(self.model_runner.req_to_token_pool.req_to_token, batch.req_pool_indices, prefix_lens, 1)
        return self._judge(
            batch,
            tree,
            lambda: prepare_plain(batch, self.model_runner, tree, slots),
            draft_input=draft_input,
            slots=slots,
            on_publish=on_publish,
            grammar_barrier=grammar_barrier,
            write_draft_kv=lambda hidden, acceptance: self._write_root_kv(hidden, acceptance, slots, tree.positions),
        )

    def _write_root_kv(
        self: DDTreeWorker,
        hidden_states: torch.Tensor,
        acceptance: Acceptance,
        slots: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        """Draft KV of the one token of each request.

        Args:
            hidden_states: [bs, features].
            slots: Of the roots, int64 [bs, 1].
            positions: Of them, int64 [bs, 1].
        """
        graphs = self._root_kv_graphs
        if graphs is not None:
            placed = graphs.place(slots, positions)
            if placed is not None and graphs.replay(hidden_states, acceptance, placed):
                return
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=hidden_states,
            cache_loc=slots.reshape(-1),
            cache_loc_2d=slots,
            positions=positions.reshape(-1),
            commit_lens=acceptance.commit_lens,
        )


def prepare_plain(batch: ScheduleBatch, model_runner: Any, tree: Tree, slots: torch.Tensor) -> ForwardBatch:
    """The target's batch of plain decoding, its attention metadata written already.

    Args:
        tree: The roots.
        slots: Of the roots, int64 [bs, 1].
    """
    draft_input = batch.spec_info
    prefix = batch.seq_lens, batch.seq_lens_cpu, batch.seq_lens_sum
    batch.input_ids, batch.out_cache_loc = tree.tokens.reshape(-1), slots.reshape(-1)
    batch.spec_info = None
    # In plain decoding the lengths count the token that goes in. The host knows no more of them than a bound: its own
    # may lag by the step in flight (0.5.14), or there are none.
    batch.seq_lens = batch.seq_lens + 1
    batch.seq_lens_cpu, batch.seq_lens_sum = reserved_lens(draft_input)
    forward_batch = decode_batch(batch, model_runner)
    if forward_batch.mrope_positions is not None:
        # Up to 0.5.17 SGLang makes them of the host's lengths.
        forward_batch.compute_spec_mrope_positions(model_runner, batch, seq_positions=tree.positions)
    runner = model_runner.decode_cuda_graph_runner
    if runner and runner.can_run_graph(forward_batch):
        runner.load_batch(forward_batch)
    else:
        model_runner.attn_backend.init_forward_metadata(forward_batch)
    batch.seq_lens, batch.seq_lens_cpu, batch.seq_lens_sum = prefix
    batch.spec_info = draft_input
    return forward_batch
