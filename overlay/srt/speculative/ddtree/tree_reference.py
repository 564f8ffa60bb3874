# SPDX-License-Identifier: Apache-2.0
"""The best-first tree by tensor operations of fixed shape: what `tree_kernel` has to give, bit for bit.

The paper (Algorithm 1 of arXiv 2604.12989) pops a heap, one node at a time. A beam gets the same tree: the `budget`
best prefixes of depth d extend the `budget` best prefixes of depth d - 1, because a prefix never scores higher than its
parent. So one top-`budget` a depth and one over all depths give exactly the heap's nodes, in its order.
"""

from __future__ import annotations

import itertools

import torch
from sglang.srt.speculative.ddtree.tree import Tree, ordered_topk
from sglang.srt.speculative.ddtree.tree_mask import write_by_rows


def grow_by_beam(
    roots: torch.Tensor,
    log_probs: torch.Tensor,
    token_ids: torch.Tensor,
    budget: int,
    *,
    width: int | None = None,
    prefix_lens: torch.Tensor | None = None,
    chain_seed: bool = False,
    links: bool = False,
    mask: torch.Tensor | None = None,
) -> Tree:
    """Grow the tree of every request, the reference; arguments as in `build_tree`."""
    levels = _beam_levels(log_probs.masked_fill(log_probs.isnan(), float("-inf")), token_ids, budget)
    pool = [torch.cat(columns, dim=1) for columns in zip(*levels, strict=True)]
    scores, tokens, parents, depths, ranks = _select(pool, budget, _seeds(levels) if chain_seed else [])
    reachable = scores > float("-inf")

    def with_root(first: torch.Tensor | float, rest: torch.Tensor) -> torch.Tensor:
        column = torch.as_tensor(first, dtype=rest.dtype, device=rest.device).expand(rest.shape[0])
        return torch.cat([column.unsqueeze(1), rest], dim=1)

    parents = with_root(-1, torch.where(reachable, parents, -1))
    depths = with_root(0, torch.where(reachable, depths, 0))
    first_child, next_sibling = tree_links(parents) if links else (None, None)
    ranks, scores = with_root(0, torch.where(reachable, ranks, 0)), with_root(0.0, scores)
    tree = Tree(
        tokens=with_root(roots, torch.where(reachable, tokens, roots.unsqueeze(1))),
        parents=parents,
        depths=depths,
        ranks=ranks,
        positions=depths if prefix_lens is None else prefix_lens.to(torch.int64).unsqueeze(1) + depths,
        scores=scores,
        max_depth=min(log_probs.shape[1], budget),
        grown_scores=scores,
        grown_ranks=ranks,
        first_child=first_child,
        next_sibling=next_sibling,
    )
    tree = tree if width is None else tree.first(width)
    if mask is not None:
        assert prefix_lens is not None
        write_by_rows(mask, tree, prefix_lens, whole=False)
    return tree


def tree_links(parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """First child and next sibling of each node, -1 where there is none.

    Args:
        parents: Index of the parent node, below the node's own; -1 for the root and for padding; int64 [bs, W].

    Returns:
        Two int32 [bs, W], the type of the buffers that CUDA graphs replay from.
    """
    width = parents.shape[1]
    nodes = torch.arange(width, device=parents.device)
    # The nearest later node for which a condition holds, or W.
    child_of = parents.unsqueeze(1) == nodes.unsqueeze(1)  # [b, i, j] = j is a child of i
    sibling_of = (parents.unsqueeze(1) == parents.unsqueeze(2)) & (parents >= 0).unsqueeze(1) & (nodes > nodes[:, None])
    first_child, next_sibling = (
        torch.where(condition, nodes, width).amin(dim=2) for condition in (child_of, sibling_of)
    )
    return tuple(torch.where(link < width, link, -1).to(torch.int32) for link in (first_child, next_sibling))


def _beam_levels(log_probs: torch.Tensor, token_ids: torch.Tensor, budget: int) -> list[tuple[torch.Tensor, ...]]:
    """The `budget` best prefixes of each depth, each [bs, <= budget]: scores, tokens, parent's place, depth, rank.

    Places number the pool: -1 is the root, then the levels one after the other.
    """
    batch, horizon, choices = log_probs.shape
    beam = log_probs.new_zeros((batch, 1))
    places = torch.full((batch, 1), -1, dtype=torch.int64, device=log_probs.device)
    levels, filled = [], 0
    for depth in range(min(horizon, budget)):
        candidates = (beam.unsqueeze(2) + log_probs[:, depth].unsqueeze(1)).flatten(1)
        width = min(budget, candidates.shape[1])
        beam, flat = ordered_topk(candidates, width)
        ranks = flat % choices
        tokens = token_ids[:, depth].gather(1, ranks)
        levels.append((beam, tokens, places.gather(1, flat // choices), torch.full_like(flat, depth + 1), ranks))
        places = torch.arange(filled, filled + width, device=log_probs.device).expand(batch, width)
        filled += width
    return levels


def _seeds(levels: list[tuple[torch.Tensor, ...]]) -> list[int]:
    """The places of the chain of first choices: the first of each level, since nothing of its depth scores higher."""
    return list(itertools.accumulate((level[0].shape[1] for level in levels[:-1]), initial=0))


def _select(pool: list[torch.Tensor], budget: int, seeds: list[int]) -> tuple[torch.Tensor, ...]:
    """The `budget` best nodes of the pool, each [bs, budget]: scores, tokens, parents as node indices, depths, ranks.

    Equal scores go to the lower place: to the shallower node, so a parent always precedes its child.

    Args:
        seeds: Places that come before all others, in this order, where there is a node.
    """
    batch, size = pool[0].shape
    kept = min(budget, size)
    order = pool[0]
    if seeds:
        first = torch.arange(len(seeds), 0, -1, dtype=order.dtype, device=order.device)  # above every log-probability
        order = order.clone()
        order[:, seeds] = torch.where(order[:, seeds] > float("-inf"), first, order[:, seeds])
    _, places = ordered_topk(order, kept)
    scores = pool[0].gather(1, places)
    node_at = torch.zeros((batch, size + 1), dtype=torch.int64, device=scores.device)
    node_at.scatter_(1, places + 1, torch.arange(1, kept + 1, device=scores.device).expand(batch, kept))
    parents = node_at.gather(1, pool[2].gather(1, places) + 1)  # column 0 is the root, node 0
    columns = [scores, pool[1].gather(1, places), parents, pool[3].gather(1, places), pool[4].gather(1, places)]
    if kept == budget:
        return tuple(columns)
    missing = budget - kept
    fills = (float("-inf"), 0, 0, 0, 0)
    return tuple(torch.nn.functional.pad(c, (0, missing), value=fill) for c, fill in zip(columns, fills, strict=True))
