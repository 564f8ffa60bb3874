# SPDX-License-Identifier: Apache-2.0
"""Every kernel of a step launched once at start-up: Triton compiles a variant when it is first launched.

A lane, a chain, a penalised request: each comes upon variants that no step before it had, and all requests of the
server wait for the compiler. So a step of each kind is imitated before anything is served, on tensors of its own. What
is compiled later all the same is logged (`launching`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.speculative.ddtree import launching
from sglang.srt.speculative.ddtree.accept import Acceptance, accept
from sglang.srt.speculative.ddtree.budgets import is_auto
from sglang.srt.speculative.ddtree.captured_head import by_position
from sglang.srt.speculative.ddtree.choosing import CHAIN, NONE, TREE, tree_shape
from sglang.srt.speculative.ddtree.draft_head import Choices
from sglang.srt.speculative.ddtree.launching import LEAST_REQUESTS
from sglang.srt.speculative.ddtree.published import spec
from sglang.srt.speculative.ddtree.step_mask import StepMask
from sglang.srt.speculative.ddtree.tree import Tree, build_tree, root_tree
from sglang.srt.speculative.ddtree.warming_parts import DRAFTS_GRAMMARS, warm_commit


logger = logging.getLogger(__name__)


def warm_up(worker: Any) -> None:
    """Imitate a step of every kind that the worker can take, but for its model's forwards; waits for the device.

    Every tensor-parallel rank imitates the same steps: the head gathers over all of them.

    Args:
        worker: With its lanes captured.
    """
    start, before = time.perf_counter(), launching.compiled_kernels()
    for width, shape, grown in kinds_of(worker._lanes.widths, int(worker.block_size), grows=is_auto(spec())):
        _imitate(worker, width, shape, grown)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    launching.begin_serving()
    if get_tp_group().rank_in_group == 0:
        logger.info(
            "DDTREE: %d variants of kernels were compiled or loaded in %.1f s.",
            launching.compiled_kernels() - before,
            time.perf_counter() - start,
        )


def kinds_of(widths: Sequence[int], block_size: int, *, grows: bool) -> list[tuple[int, str, int]]:
    """Width, shape and grown width of every kind of step.

    Args:
        widths: The lanes', ascending.
        block_size: Tokens of a draft block.
        grows: Whether trees are grown wider than they are verified, as by `auto`.
    """
    kinds = []
    for width in widths:
        wider = [other for other in widths if other > width and grows and width > 1]
        grown = dict.fromkeys((width, *wider[:1], *wider[-1:]))
        kinds += [(width, TREE if width > 1 else NONE, nodes) for nodes in grown]
    return [*kinds, *([(block_size, CHAIN, block_size)] if block_size in widths else [])]


def batch_classes(most: int) -> list[int]:
    """A batch size of each variant that the size decides about: up to `LEAST_REQUESTS`, then powers of two.

    Args:
        most: Requests that may run.
    """
    sizes, size = [1], LEAST_REQUESTS
    while size < most and torch.cuda.is_available():  # elsewhere nothing is compiled
        sizes.append(size + 1)
        size *= 2
    return sizes


def _imitate(worker: Any, width: int, shape: str, grown: int) -> None:
    """A step of one kind, with batches of each class."""
    block_size, device = int(worker.block_size), worker.model_runner.device
    backend = next(lane.backend for lane in worker._lanes.all() if lane.width == width)
    choices: Choices | None = None
    budget, topk, chain_seed = tree_shape(grown, shape, worker.topk_cap, chain_seed=worker.chain_seed)
    if shape != NONE:
        head = worker._draft_head
        hidden = torch.zeros((block_size - 1, head.hidden_size), dtype=worker.model_runner.dtype, device=device)
        calibration = worker._calibration
        choices = head.top_log_probs(hidden, topk, calibration.exponents, moments=calibration.is_fitted)
    for batch in batch_classes(int(worker.model_runner.max_running_requests)):
        lens = torch.ones(batch, dtype=torch.int64, device=device)
        if choices is None:
            _judge(worker, root_tree(lens, lens), lens, None)
            continue
        table = [part.expand(batch, -1, -1).contiguous() for part in by_position(choices, block_size)]
        for links in {bool(worker._is_recurrent), bool(worker._is_recurrent) or DRAFTS_GRAMMARS}:
            mask = StepMask.of(backend, lens, batch * width * (1 + width))
            tree = build_tree(
                lens,
                table[0],
                table[1],
                budget,
                width=width,
                prefix_lens=lens,
                chain_seed=chain_seed,
                links=links,
                mask=mask.tails,
            )
            mask.written(tree, lens)
        acceptance = _judge(worker, tree, lens, choices if batch == 1 else None)
        worker._choosing.warm_up(tree, acceptance, (table[0], table[1]))


def _judge(worker: Any, tree: Tree, lens: torch.Tensor, choices: Choices | None) -> Acceptance:
    """Accept nothing but roots, where all of a tree is judged and where the root alone is; take that in."""
    nothing = torch.full_like(tree.tokens, -1)
    for root_only in (torch.ones_like(lens, dtype=torch.bool), None):
        acceptance = accept(tree, nothing, prefix_lens=lens, block_size=int(worker.block_size), root_only=root_only)
        if choices is not None:
            worker._calibration.warm_up(choices, acceptance, root_only)
    warm_commit(worker, tree, acceptance)
    return acceptance
