# SPDX-License-Identifier: Apache-2.0
"""For which batch sizes a lane is captured: wide trees of many requests cost memory and never pay.

The logits of a step are float32 over the whole vocabulary: 48 trees of 257 nodes take 7.5 GB at 152 k tokens.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.speculative.ddtree.budgets import are_default, budgets, is_auto
from sglang.srt.speculative.ddtree.gates import is_ddtree_on
from sglang.srt.speculative.ddtree.graph_memory import free_bytes, node_bytes
from sglang.srt.speculative.ddtree.published import spec


logger = logging.getLogger(__name__)

#: Nodes of a step above which no lane of `auto`'s own choice is captured: 32 trees of budget 64. Far below it a step
#: is bound by compute, and a narrower tree accepts more tokens a second.
_MOST_NODES = 32 * 65
#: The share of the free memory that lanes may take; draft graphs and the work of a step need the rest.
_SHARE = 0.5
#: `auto` captures every batch size up to this one, and above it only what is a fifth larger than the last: a graph
#: takes about a quarter of a second, and padding costs little beside a wrong width.
_EVERY_SIZE = 4
_SPACING = 1.2


def lane_batch_sizes(model_runner: Any, batch_sizes: list[int], width: int) -> list[int]:
    """Those of SGLang's batch sizes that the target's graphs of one verify width are captured for, ascending.

    A budget that the user named alone gets all of them, as without lanes; of several, a wide one gets what memory
    holds. The default lanes of `auto` get what can pay, and the chain's own width gets all.

    Args:
        model_runner: Of the graphs; a draft worker's are left alone.
        batch_sizes: SGLang's choice, ascending.
        width: Nodes per request.

    Raises:
        ValueError: Not one request of this width fits; the text names the largest budget that does.
    """
    if not is_ddtree_on() or model_runner.is_draft_worker or len(budgets(spec())) == 1:
        return batch_sizes
    if not is_auto(spec()) and width == int(spec().speculative_ddtree_budget) + 1:
        return batch_sizes
    most = _most_nodes(model_runner, batch_sizes)
    kept = [size for size in batch_sizes if size * width <= most]
    if not kept:
        raise ValueError(
            f"DDTREE: CUDA graphs of a budget of {width - 1} do not fit: free memory holds the logits and attention "
            f"buffers of {most} nodes. Leave it out of --speculative-ddtree-budgets (at most {most - 1} fits), or "
            "lower --mem-fraction-static."
        )
    return spaced(kept) if are_default(spec()) else kept


def spaced(batch_sizes: list[int]) -> list[int]:
    """Fewer of them: every small one, then each a fifth above the last, and the largest."""
    kept: list[int] = []
    for size in batch_sizes:
        if size <= _EVERY_SIZE or size >= kept[-1] * _SPACING or size == batch_sizes[-1]:
            kept.append(size)
    return kept


def _most_nodes(model_runner: Any, batch_sizes: list[int]) -> int:
    """Nodes of a step that graphs may be captured for; the first answer holds, on every rank."""
    known = getattr(model_runner, "ddtree_most_nodes", None)
    if known is not None:
        return int(known)
    most = _fitting_nodes(model_runner, batch_sizes)
    if are_default(spec()):
        most = min(most, max(_MOST_NODES, batch_sizes[-1] * int(spec().speculative_dflash_block_size)))
    model_runner.ddtree_most_nodes = most
    return most


def _fitting_nodes(model_runner: Any, batch_sizes: list[int]) -> int:
    """Nodes whose buffers fit into the memory share of the rank that has least."""
    largest = budgets(spec())[-1] + 1
    if not torch.cuda.is_available():
        return largest * batch_sizes[-1]
    per_node = node_bytes(model_runner) + _kept_bytes(model_runner, batch_sizes)
    fitting = int(_SHARE * free_bytes() // per_node)
    group = get_tp_group()
    if group.world_size > 1:
        least = torch.tensor([fitting])
        torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN, group=group.cpu_group)
        fitting = int(least)
    if group.rank_in_group == 0:
        logger.info(
            "DDTREE: %.1f GiB are free; lanes are captured for steps of up to %d nodes (%.2f MiB each).",
            free_bytes() / 2**30,
            min(fitting, largest * batch_sizes[-1]),
            per_node / 2**20,
        )
    return fitting


def _kept_bytes(model_runner: Any, batch_sizes: list[int]) -> int:
    """Bytes a node of what the graphs of all batch sizes keep: the hidden states that the drafter reads."""
    config = model_runner.model_config
    layers = 8  # how many the drafter reads is not known here; no drafter of DFLASH's has more
    states = int(config.hidden_size) * layers * model_runner.dtype.itemsize
    return states * sum(batch_sizes) // batch_sizes[-1]
