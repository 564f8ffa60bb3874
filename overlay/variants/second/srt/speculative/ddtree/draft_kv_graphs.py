# SPDX-License-Identifier: Apache-2.0
"""The draft KV of a step's committed tokens in a CUDA graph: a dozen launches of SGLang's in one.

They are the same in every step but for where they read. Two launches put that in its place: the hidden states of the
committed nodes, and how many each request has; slots and positions are the draft block's, in buffers of the worker.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.speculative.ddtree.capturing import without_forward_hooks


if TYPE_CHECKING:
    from sglang.srt.speculative.ddtree.accept import Acceptance

logger = logging.getLogger(__name__)

#: Set to 1: every launch on its own, as in an engine without graphs.
EAGER_VARIABLE = "SGLANG_DDTREE_EAGER_DRAFT_KV"


class DraftKVGraphs:
    """One graph a batch size.

    Args:
        append: SGLang's function that writes the draft KV: (hidden states [bs * S, features], commit lengths int32
            [bs], slots int64 [bs, S], positions int64 [bs * S]).
        slots: The worker's buffer of block slots, int64 [most requests, S].
        positions: And of block positions, int64 [most requests, S].
        features: Size of a node's hidden states.
        dtype: Of the hidden states.
    """

    def __init__(
        self,
        append: Callable[..., None],
        *,
        slots: torch.Tensor,
        positions: torch.Tensor,
        features: int,
        dtype: torch.dtype,
    ) -> None:
        most, block_size = slots.shape
        self._append, self._slots, self._positions, self._block_size = append, slots, positions, block_size
        self._hidden = torch.zeros((most * block_size, features), dtype=dtype, device=slots.device)
        self._lens = torch.zeros(most, dtype=torch.int32, device=slots.device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._sizes: tuple[int, ...] = ()
        self._kept: list[Any] = []

    def capture(self, sizes: Sequence[int], workspaces: Callable[[], list[Any]]) -> None:
        """Capture the graphs; nothing is written to the pool meanwhile, since no request has committed anything.

        Args:
            sizes: Batch sizes.
            workspaces: Tensors that SGLang's function works in. It may replace them by larger ones later; the graphs
                go on working in these.
        """
        pool = torch.cuda.graph_pool_handle()
        self._slots.zero_()
        self._positions.zero_()
        for size in sorted(sizes, reverse=True):
            for _ in range(2):
                self._run(size)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._run(size)
            self._graphs[size] = graph
            self._kept.append(workspaces())
        self._sizes = tuple(sorted(sizes))
        self._warm_up()

    def replay(self, hidden_states: torch.Tensor, acceptance: Acceptance, slots: torch.Tensor) -> bool:
        """Write the draft KV of a step; False where no graph can.

        Args:
            hidden_states: Of all nodes, [bs * W, features].
            slots: The step's block slots, int64 [bs, S].
        """
        batch = slots.shape[0]
        size = next((size for size in self._sizes if size >= batch), None)
        # A larger batch than any captured one makes the worker take larger buffers, and it keeps them.
        if size is None or slots.data_ptr() != self._slots.data_ptr() or hidden_states.dtype != self._hidden.dtype:
            return False
        from sglang.srt.speculative.ddtree.staging_kernel import stage

        rows = acceptance.rows[:, : self._block_size].contiguous()
        stage(hidden_states, rows, acceptance.commit_lens, self._hidden, self._lens[:size])
        self._graphs[size].replay()
        return True

    def place(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
        """Put slots and positions [bs, S] where the graphs read them: the slots there, None for too many requests."""
        batch = slots.shape[0]
        if batch > self._slots.shape[0]:
            return None
        self._positions[:batch].copy_(positions)
        return self._slots[:batch].copy_(slots)

    def _warm_up(self) -> None:
        """Launch what `replay` launches, for each variant that is compiled: zeros onto zeros."""
        from sglang.srt.speculative.ddtree.staging_kernel import stage

        rows = torch.zeros((1, self._block_size), dtype=torch.int64, device=self._slots.device)
        for size in self._sizes:
            stage(self._hidden, rows, torch.zeros_like(self._lens[:1]), self._hidden, self._lens[:size])

    def _run(self, size: int) -> None:
        rows = size * self._block_size
        self._append(self._hidden[:rows], self._lens[:size], self._slots[:size], self._positions[:size].reshape(-1))


def capture_draft_kv(worker: Any, sizes: Sequence[int], *, roots: bool = False) -> DraftKVGraphs | None:
    """The graphs of a worker, or None where there are none to capture, or capturing fails: then steps launch eagerly.

    Args:
        worker: The second worker; its draft model and pools are built.
        sizes: Batch sizes that a verify graph was captured for.
        roots: Of steps that draft nothing: one token of each request, placed by `DraftKVGraphs.place`.
    """
    features = getattr(getattr(worker.draft_model, "fc", None), "in_features", None)
    if not sizes or features is None or os.environ.get(EAGER_VARIABLE) == "1":
        return None
    worker._ensure_draft_block_buffers(max(sizes))
    buffers = worker._draft_verify_out_cache_loc_buf, worker._draft_block_positions_buf
    slots, positions = (torch.zeros_like(buffer[:, :1]) for buffer in buffers) if roots else buffers
    fused = worker._use_fused_kv_materialize, worker._fused_kv_helper
    start = time.perf_counter()

    def append(hidden: torch.Tensor, commit_lens: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        worker._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=hidden,
            cache_loc=slots.reshape(-1),
            cache_loc_2d=slots,
            positions=positions,
            commit_lens=commit_lens,
        )

    def workspaces() -> list[Any]:
        helper = worker._fused_kv_helper
        found = [] if helper is None else [value for value in vars(helper).values() if isinstance(value, torch.Tensor)]
        return [*found, getattr(getattr(helper, "rotary_emb", None), "cos_sin_cache", None)]

    try:
        graphs = DraftKVGraphs(
            append,
            slots=slots,
            positions=positions,
            features=int(features),
            dtype=worker.model_runner.dtype,
        )
        with without_forward_hooks(worker.draft_model):
            graphs.capture(sizes, workspaces)
    except Exception as error:  # (SGLang's functions raise what they like; without graphs all goes on)
        logger.warning("DDTREE: the draft KV is launched step by step; no graph of it could be captured: %s", error)
        return None
    finally:
        # What cannot be captured can still be launched.
        worker._use_fused_kv_materialize, worker._fused_kv_helper = fused
    if get_tp_group().rank_in_group == 0:
        logger.info(
            "DDTREE: captured the draft KV of %d batch sizes%s in %.1f s.",
            len(sizes),
            " without drafts" if roots else "",
            time.perf_counter() - start,
        )
    return graphs
