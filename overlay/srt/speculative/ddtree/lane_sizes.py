# SPDX-License-Identifier: Apache-2.0
"""For which batch sizes a lane is captured: wide trees of many requests cost memory and never pay.

The logits of a step are float32 over the whole vocabulary: 48 trees of 257 nodes take 7.5 GB at 152 k tokens.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.speculative.ddtree.args import verify_width
from sglang.srt.speculative.ddtree.budgets import DEFAULT_BUDGET, are_default, budgets, is_auto
from sglang.srt.speculative.ddtree.default_budget import fixed_instead
from sglang.srt.speculative.ddtree.gates import is_ddtree_on
from sglang.srt.speculative.ddtree.graph_memory import free_bytes
from sglang.srt.speculative.ddtree.lane_bytes import NodeBytes, Planned, lanes_bytes, plan
from sglang.srt.speculative.ddtree.promised import promised_bytes
from sglang.srt.speculative.ddtree.published import spec


logger = logging.getLogger(__name__)

#: Nodes of a step above which no lane of `auto`'s own choice is captured: 32 trees of budget 64. Far below it a step
#: is bound by compute, and a narrower tree accepts more tokens a second.
_MOST_NODES = 32 * 65
#: The share of the free memory that lanes may take beside the configured budget's, which is captured as without lanes;
#: draft graphs and the work of a step need the rest.
_SHARE = 0.5
#: `auto` captures every batch size up to this one, and above it only what is a fifth larger than the last: a graph
#: takes about a quarter of a second, and padding costs little beside a wrong width.
_EVERY_SIZE = 4
_SPACING = 1.2


def lane_batch_sizes(model_runner: Any, batch_sizes: list[int], width: int) -> list[int]:
    """Those of SGLang's batch sizes that the target's graphs of one verify width are captured for, ascending.

    The configured budget gets all of them, as without lanes; another that the user named gets what memory holds beside
    it. The default lanes of `auto` get what can pay, and the chain's own width gets all.

    Args:
        model_runner: Of the graphs; a draft worker's are left alone.
        batch_sizes: SGLang's choice, ascending.
        width: Nodes per request.

    Raises:
        ValueError: Not one request of this width fits; the text names the largest budget that does.
    """
    if not is_ddtree_on():
        return batch_sizes
    if model_runner.is_draft_worker:
        plan(None)
        return batch_sizes
    kept = batch_sizes
    if len(budgets(spec())) > 1:
        most = _most_nodes(model_runner, batch_sizes)
        kept = _sizes_within(most, model_runner, batch_sizes, width)
        if not kept:
            raise ValueError(_refusal(model_runner, batch_sizes, width))
    if width == verify_width(spec()):
        plan(Planned(model_runner, kept))
    return kept


def spaced(batch_sizes: list[int]) -> list[int]:
    """Fewer of them: every small one, then each a fifth above the last, and the largest."""
    kept: list[int] = []
    for size in batch_sizes:
        if size <= _EVERY_SIZE or size >= kept[-1] * _SPACING or size == batch_sizes[-1]:
            kept.append(size)
    return kept


def _sizes_within(most: int, model_runner: Any, batch_sizes: list[int], width: int) -> list[int]:
    """The batch sizes of a lane where no step may have more than so many nodes."""
    configured = _configured_width()
    if width == configured:
        return batch_sizes
    kept = [size for size in batch_sizes if size * width <= most]
    if not kept and width < configured:
        kept = batch_sizes[:1]  # it lies in buffers that are there anyway
    # Without padding a batch is served by a graph of its own size or by none.
    padding = not model_runner.server_args.disable_cuda_graph_padding
    return spaced(kept) if padding and are_default(spec()) else kept


def _configured_width() -> int:
    """The width of the configured budget; 0 with `auto`, which has none."""
    return 0 if is_auto(spec()) else int(spec().speculative_ddtree_budget) + 1


def _limit(node: NodeBytes, free: int, batch_sizes: list[int]) -> float:
    """Bytes that all lanes may take: the configured budget's own, and a share of what it leaves free."""
    given = _with_configured([], node, batch_sizes)
    return given + _SHARE * max(0, free - given)


def _with_configured(lanes: list[tuple[int, list[int]]], node: NodeBytes, batch_sizes: list[int]) -> int:
    """Bytes of some lanes and the configured budget's."""
    width = _configured_width()
    return lanes_bytes(sorted([*lanes, (width, batch_sizes)], reverse=True) if width else lanes, node)


def _refusal(model_runner: Any, batch_sizes: list[int], width: int) -> str:
    """Why a lane gets no graph, and the largest budget that would get one in its place.

    A fixed one is captured for every batch size, but may take all that is free.
    """
    node, free = NodeBytes.of(model_runner), free_bytes() - promised_bytes(model_runner)
    limit, given = _limit(node, free, batch_sizes), _with_configured([], node, batch_sizes)
    fitting = (
        narrower
        for narrower in range(width - 1, 1, -1)
        if _with_configured([(narrower, batch_sizes[:1])], node, batch_sizes) <= limit
    )
    beside = f" beside those of {_configured_width() - 1}" if given else ""
    left = f"{(limit - given) / 2**30:.1f} GiB"
    alone = (most for most in range(DEFAULT_BUDGET, 0, -1) if lanes_bytes([(most + 1, batch_sizes)], node) <= free)
    fixed = fixed_instead(spec(), next(alone, 0))
    return (
        f"DDTREE: CUDA graphs of a budget of {width - 1} do not fit{beside}: lanes may take {left}, half of what is "
        "left free. Name budgets without it with --speculative-ddtree-budgets (at most "
        f"{next(fitting, 1) - 1} fits if no other is named), {fixed and f'use {fixed}, '}or lower "
        "--cuda-graph-max-bs or --mem-fraction-static."
    )


def _most_nodes(model_runner: Any, batch_sizes: list[int]) -> int:
    """Nodes of a step that graphs may be captured for; the first answer holds, on every rank."""
    known = getattr(model_runner, "ddtree_most_nodes", None)
    if known is not None:
        return int(known)
    most = (budgets(spec())[-1] + 1) * batch_sizes[-1]
    if are_default(spec()):
        most = min(most, max(_MOST_NODES, batch_sizes[-1] * int(spec().speculative_dflash_block_size)))
    if torch.cuda.is_available():
        most = _fitting_nodes(model_runner, batch_sizes, most)
    model_runner.ddtree_most_nodes = most
    return most


def _fitting_nodes(model_runner: Any, batch_sizes: list[int], most: int) -> int:
    """Nodes of a step, at most so many, for which all lanes fit into the memory share of the rank that has least."""
    node, free = NodeBytes.of(model_runner), free_bytes() - promised_bytes(model_runner)
    limit = _limit(node, free, batch_sizes)
    widths = [budget + 1 for budget in reversed(budgets(spec()))]

    def needed(nodes: int) -> int:
        return lanes_bytes([(w, _sizes_within(nodes, model_runner, batch_sizes, w)) for w in widths], node)

    steps = sorted({width * size for width in widths for size in batch_sizes if width * size <= most}, reverse=True)
    fitting = next((nodes for nodes in steps if needed(nodes) <= limit), 0)
    group = get_tp_group()
    if group.world_size > 1:
        least = torch.tensor([fitting])
        torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN, group=group.cpu_group)
        fitting = int(least)
    if group.rank_in_group == 0:
        logger.info(
            "DDTREE: %.1f GiB are free; lanes are captured for steps of up to %d nodes, which take %.1f GiB in all.",
            free / 2**30,
            fitting,
            needed(fitting) / 2**30,
        )
    return fitting
