# SPDX-License-Identifier: Apache-2.0
"""One tree verify step of a batch: acceptance on the device, commit with what the host makes of it.

Requests stop on the host, so that the host has to know what was emitted: one copy, `Acceptance.report`. It is asked for
as soon as the accept walk is launched, and waited for after everything has been launched that it does not change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.speculative.ddtree import stages
from sglang.srt.speculative.ddtree.accept import Acceptance, accept, emitted_of, paths_of
from sglang.srt.speculative.ddtree.emitting import emit
from sglang.srt.speculative.ddtree.host_copies import StepCopies, indices_on
from sglang.srt.speculative.ddtree.kv_move import move_to_front
from sglang.srt.speculative.ddtree.placing import Placed, place
from sglang.srt.speculative.ddtree.targets import TargetChooser, adjust_logits, count_roots, roots_only
from sglang.srt.speculative.ddtree.trace import trace_step
from sglang.srt.speculative.ddtree.tree import Tree
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
    #: Draft block, bonus token included.
    block_size: int = 0
    #: The pool whose KV moves at commit; needed when pages are larger than one slot.
    pool: MHATokenToKVPool | None = None
    #: Takes in an acceptance and which requests had only their roots judged, before the host waits: launches only.
    observe: Callable[[Acceptance, torch.Tensor | None], None] | None = None
    #: Launches what only the device's acceptance decides, before the host waits for it: (batch, acceptance, hidden
    #: states of all nodes). What it does with the hidden states nobody else has to do; None gives them back instead.
    on_accepted: Callable[[Any, Acceptance, torch.Tensor], None] | None = None
    #: Bring the report to the host, step after step.
    copies: StepCopies = field(default_factory=StepCopies)
    #: Counts what was accepted, as soon as the device's acceptance is launched.
    count: Callable[[Acceptance], None] | None = None
    #: What the host has to do anyway, done while the device is busy.
    meanwhile: Callable[[], None] | None = None
    #: Whether this process writes the trace: one of the tensor-parallel ranks.
    traced: bool = False
    #: For the trace: whether a top-k cap can be shown to have changed nothing, bool [bs].
    exact: torch.Tensor | None = None
    #: After `verify`, unless a stop cut a path: where the device has put the slots. None with larger pages.
    placed: Placed | None = None
    #: After `verify`: the last node each request committed, int64 [bs].
    last_nodes: torch.Tensor | None = None
    #: After `verify`: node at each step of the committed path, int64 [bs, P].
    path: torch.Tensor | None = None

    def verify(
        self, *, batch: ScheduleBatch, logits_output: LogitsProcessorOutput, page_size: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
        """Accept a path of each tree and commit it.

        Returns:
            What `DFlashVerifyInput.verify` returns: current tokens int64 [bs], commit lengths int32 [bs], hidden
            states of the committed nodes [sum of commit lengths, features] or none of them, accepted draft tokens per
            request.
        """
        if batch.forward_mode.is_idle():
            empty = torch.empty((0,), dtype=torch.int64, device=batch.device)
            return empty, empty.to(torch.int32), empty, []
        hidden_states = logits_output.hidden_states
        if hidden_states is None:
            raise RuntimeError("DDTREE verify requires the target's hidden states, but got None.")
        # Spec-v1 decoding has no reader for these; DFLASH drops them as well.
        logits_output.hidden_states = None

        stages.mark(stages.ACCEPT)
        acceptance, root_only = self._accept(batch, logits_output.next_token_logits)
        report = self.copies.of(acceptance.report)
        if self.observe is not None:
            self.observe(acceptance, root_only)
        stages.mark(stages.COMMIT)
        slots = batch.out_cache_loc.view(-1, self.draft_token_num)
        if self.pool is not None:
            move_to_front(self.pool, slots, acceptance.path, acceptance.commit_lens)
        if self.on_accepted is not None:
            self.on_accepted(batch, acceptance, hidden_states)
            hidden_states = hidden_states[:0]
        if page_size == 1:
            table, rows = batch.req_to_token_pool.req_to_token, batch.req_pool_indices
            self.placed = place(slots, acceptance, table, rows, batch.seq_lens)
        # The device has everything that it can be given; once it is through, it waits for the host.
        if self.meanwhile is not None:
            self.meanwhile()
        return self._commit(batch, acceptance, report.wait().tolist(), hidden_states, page_size)

    def _commit(
        self,
        batch: ScheduleBatch,
        acceptance: Acceptance,
        report: list[int],
        hidden_states: torch.Tensor,
        page_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
        """What the host does with a step's acceptance; returns what `verify` does.

        Args:
            report: The acceptance's, on the host.
        """
        tokens, accept_lens = emitted_of(report, len(batch.reqs), self.block_size)
        prefix_lens = batch.seq_lens_cpu.tolist()
        committed = emit(batch, tokens, accept_lens)
        if self.traced:
            trace_step([req.rid for req in batch.reqs], prefix_lens, self.tree, acceptance, committed, exact=self.exact)
        self.path, self.last_nodes = acceptance.path, acceptance.last_nodes
        current_tokens, commit_lens, new_lens = acceptance.bonus, acceptance.commit_lens, acceptance.new_seq_lens
        is_cut = sum(committed) != sum(accept_lens) + len(accept_lens)
        if is_cut:
            # A stop cut a path: the device does not know.
            paths = paths_of(report, len(batch.reqs), self.block_size)
            last_nodes = [path[count - 1] for path, count in zip(paths, committed, strict=True)]
            lens = [length + count for length, count in zip(prefix_lens, committed, strict=True)]
            known = [[req.output_ids[-1] for req in batch.reqs], committed, last_nodes, lens]
            current_tokens, cut, self.last_nodes, new_lens = indices_on(batch.device, known).view(4, -1)
            commit_lens = cut.to(torch.int32)
        if self.placed is None:
            self._keep_in_front(batch, prefix_lens, committed, page_size)
            map_slots(batch, new_lens)
        else:
            self._keep_where_they_are(batch, committed, accept_lens)
            if is_cut:
                batch.seq_lens.copy_(new_lens)
                self.placed = None
        advance(batch, committed)
        if self.on_accepted is None:
            paths = paths_of(report, len(batch.reqs), self.block_size)
            nodes = [
                request * self.draft_token_num + node
                for request, count in enumerate(committed)
                for node in paths[request][:count]
            ]
            hidden_states = hidden_states.index_select(0, indices_on(batch.device, [nodes]))
        return current_tokens, commit_lens, hidden_states, [count - 1 for count in committed]

    def _accept(self, batch: ScheduleBatch, logits: torch.Tensor) -> tuple[Acceptance, torch.Tensor | None]:
        """The path that follows the target's tokens, and requests of which only the root was judged, bool [bs]."""
        assert self.tree is not None
        assert self.targets is not None
        sampling_info, width = batch.sampling_info, self.draft_token_num
        penalised = count_roots(sampling_info, self.tree.tokens[:, 0], [req.sampling_params for req in batch.reqs])
        if sampling_info is not None:
            adjust_logits(logits, sampling_info, width)
        root_only = roots_only(sampling_info, penalised)
        acceptance = accept(
            self.tree,
            self.targets.choose(logits, sampling_info, self.positions, width),
            prefix_lens=batch.seq_lens,
            block_size=self.block_size,
            root_only=root_only,
        )
        if self.count is not None:
            self.count(acceptance)
        return acceptance, root_only

    def _keep_where_they_are(self, batch: ScheduleBatch, committed: list[int], accept_lens: list[int]) -> None:
        """Keep the committed nodes' slots in path order and free all others: with page size 1 no KV moves.

        The device has sorted them, as if nothing had cut a path.
        """
        assert self.placed is not None
        total = sum(accept_lens) + len(accept_lens)
        free = self.placed.free[: len(accept_lens) * self.draft_token_num - total]
        kept = self.placed.kept[:total]
        if sum(committed) != total:
            walked = [accepted + 1 for accepted in accept_lens]
            starts = [sum(walked[:request]) for request in range(len(walked))]
            good = [start + step for start, count in zip(starts, committed, strict=True) for step in range(count)]
            behind = sorted(set(range(total)) - set(good))
            parted = kept.index_select(0, indices_on(batch.device, [good, behind]))
            kept, free = parted[: len(good)], torch.cat([free, parted[len(good) :]])
        batch.token_to_kv_pool_allocator.free(free)
        batch.out_cache_loc = kept

    def _keep_in_front(
        self, batch: ScheduleBatch, prefix_lens: list[int], committed: list[int], page_size: int
    ) -> None:
        """Keep the first slots of each request, where its committed KV lies by now, and free the pages behind them.

        The slots of a page that is partly used stay the request's: its next step writes on from there.
        """
        width = self.draft_token_num
        kept, free = [], []
        for request, (prefix_len, count) in enumerate(zip(prefix_lens, committed, strict=True)):
            first, used = request * width, -(-(prefix_len + count) // page_size) * page_size - prefix_len
            kept += range(first, first + count)
            free += range(first + used, first + width)
        slots = batch.out_cache_loc.index_select(0, indices_on(batch.device, [kept, free]))
        batch.token_to_kv_pool_allocator.free(slots[len(kept) :])
        batch.out_cache_loc = slots[: len(kept)]


def map_slots(batch: ScheduleBatch, new_lens: torch.Tensor) -> None:
    """Map the committed slots, which `batch.out_cache_loc` holds now, to their positions; advance the device's lengths.

    Args:
        new_lens: Committed tokens of each request after the step, int64 [bs].
    """
    assign_req_to_token_pool_func(
        batch.req_pool_indices,
        batch.req_to_token_pool.req_to_token,
        batch.seq_lens,
        new_lens,
        batch.out_cache_loc,
        len(batch.reqs),
    )
    batch.seq_lens.copy_(new_lens)


def advance(batch: ScheduleBatch, committed: list[int]) -> None:
    """Advance the host's lengths by what the step added to each request."""
    for req, count in zip(batch.reqs, committed, strict=True):
        req.kv_committed_len += count
        req.kv_allocated_len = req.kv_committed_len
    lens = batch.seq_lens_cpu.numpy()
    lens += committed
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
