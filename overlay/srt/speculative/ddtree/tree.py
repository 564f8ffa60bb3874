# SPDX-License-Identifier: Apache-2.0
"""Best-first draft trees from per-position log-probabilities (Algorithm 1 of arXiv 2604.12989), for a whole batch.

The paper pops a heap, one node at a time. The reference here gets the same tree from a beam: the `budget` best
prefixes of depth d extend the `budget` best prefixes of depth d - 1, because a prefix never scores higher than its
parent. So one top-`budget` a depth and one over all depths give exactly the heap's nodes, in its order, with tensor
operations of fixed shape. On a GPU, where those are hundreds of launches, `tree_kernel` grows the same tree in one.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tree:
    """One tree per request; W = budget + 1 nodes, in order of falling score, node 0 the root (the bonus token).

    A parent's index is below its children's, and the first m nodes are the tree of budget m - 1. A seeded tree begins
    with the chain of first choices, whatever the scores. A tree with fewer reachable nodes than the budget ends in
    padding: nodes without a parent that see only themselves and can never be accepted.
    """

    #: Token ids, int64 [bs, W].
    tokens: torch.Tensor
    #: Index of the parent node, -1 for the root and for padding, int64 [bs, W].
    parents: torch.Tensor
    #: Distance from the root, int64 [bs, W].
    depths: torch.Tensor
    #: Rank of the token among the drafter's choices at its depth, 0 = first choice, int64 [bs, W].
    ranks: torch.Tensor
    #: Log-probability of the prefix under the drafter, float32 [bs, W]; 0 for the root, -inf for padding.
    scores: torch.Tensor
    #: [b, i, j] = node j is node i or an ancestor of it, bool [bs, W, W].
    ancestors: torch.Tensor
    #: Most draft tokens a path can hold, known from the shapes alone.
    max_depth: int


def ordered_topk(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of the last dimension, ties by the lower index.

    `torch.topk` leaves the order of equal values open; tensor-parallel ranks and repeated runs need one order.

    Args:
        values: float32 [..., n] without NaN, n < 2**32.
        k: At most n.

    Returns:
        Values float32 [..., k] and indices int64 [..., k].
    """
    bits = (values + 0.0).view(torch.int32).to(torch.int64)  # + 0.0: -0.0 and 0.0 are one value
    rank = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # integers in the order of the floats
    index = torch.arange(values.shape[-1], device=values.device)
    best = torch.topk((rank << 32) | (0xFFFFFFFF - index), k, dim=-1).values
    indices = 0xFFFFFFFF - (best & 0xFFFFFFFF)
    return values.gather(-1, indices), indices


def build_tree(
    roots: torch.Tensor, log_probs: torch.Tensor, token_ids: torch.Tensor, budget: int, *, chain_seed: bool = False
) -> Tree:
    """Build the best-first tree of every request.

    Args:
        roots: Bonus tokens, int64 [bs].
        log_probs: float32 [bs, L, K], falling along K, at most 0, -inf where there is no token; NaN is read as -inf.
        token_ids: int64 [bs, L, K], distinct along K.
        budget: Draft nodes per tree, at least 1.
        chain_seed: Take the chain of first choices, DFLASH's draft, before anything else. Then no target accepts less
            of the tree than of the chain, at the price of branches that the drafter thinks likelier.
    """
    if log_probs.is_cuda:
        from sglang.srt.speculative.ddtree.tree_kernel import grow_trees as grow
    else:
        grow = grow_by_beam
    tokens, parents, depths, ranks, scores = grow(roots, log_probs, token_ids, budget, chain_seed)
    max_depth = min(log_probs.shape[1], budget)
    return Tree(
        tokens=tokens,
        parents=parents,
        depths=depths,
        ranks=ranks,
        scores=scores,
        ancestors=_ancestors(parents, max_depth),
        max_depth=max_depth,
    )


def grow_by_beam(
    roots: torch.Tensor, log_probs: torch.Tensor, token_ids: torch.Tensor, budget: int, chain_seed: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Grow the tree of every request; arguments as in `build_tree`.

    Returns:
        Tokens, parents, depths, ranks int64 [bs, W] and scores float32 [bs, W], as `Tree` holds them.
    """
    levels = _beam_levels(log_probs.masked_fill(log_probs.isnan(), float("-inf")), token_ids, budget)
    pool = [torch.cat(columns, dim=1) for columns in zip(*levels, strict=True)]
    scores, tokens, parents, depths, ranks = _select(pool, budget, _seeds(levels) if chain_seed else [])
    reachable = scores > float("-inf")

    def with_root(first: torch.Tensor | float, rest: torch.Tensor) -> torch.Tensor:
        column = torch.as_tensor(first, dtype=rest.dtype, device=rest.device).expand(rest.shape[0])
        return torch.cat([column.unsqueeze(1), rest], dim=1)

    return (
        with_root(roots, torch.where(reachable, tokens, roots.unsqueeze(1))),
        with_root(-1, torch.where(reachable, parents, -1)),
        with_root(0, torch.where(reachable, depths, 0)),
        with_root(0, torch.where(reachable, ranks, 0)),
        with_root(0.0, scores),
    )


def is_exact(tree: Tree, log_probs: torch.Tensor, *, chain_seed: bool = False) -> torch.Tensor:
    """Whether the choices that a top-k cap left out could not have changed the tree, bool [bs].

    A choice left out of a position is at most as likely as the last one kept there. Where no prefix in the tree, nor
    the root, could take such a choice and score above the last node that was chosen by its score, the tree is the one
    without a cap. Where it could, it may or may not be.

    Args:
        log_probs: What the tree was built from, float32 [bs, L, K].
        chain_seed: As the tree was built: the nodes of its chain were not chosen by their scores.
    """
    width = tree.tokens.shape[1]
    nodes = torch.arange(width, device=tree.tokens.device)
    inner = (tree.parents >= 0) | (nodes == 0)
    chosen = inner & (nodes > 0)
    if chain_seed:
        chosen &= ~((tree.depths == nodes) & (tree.parents == nodes - 1)).cumprod(dim=1).bool()
    last_kept = log_probs.nan_to_num(nan=float("-inf"))[..., -1]
    last_kept = torch.nn.functional.pad(last_kept, (0, 1), value=float("-inf"))  # nothing below the last position
    left_out = (tree.scores + last_kept.gather(1, tree.depths)).masked_fill(~inner, float("-inf"))
    bar = tree.scores.masked_fill(~chosen, float("inf")).amin(dim=1)
    bar = bar.masked_fill(~inner.all(dim=1), float("-inf"))  # a tree with room takes anything
    return left_out.amax(dim=1) <= bar


def verify_mask(tree: Tree, prefix_lens: list[int]) -> torch.Tensor:
    """The flat allow-mask that SGLang's attention backends read.

    Args:
        prefix_lens: Committed tokens of each request.

    Returns:
        bool [sum over requests of W * (prefix_len + W)]: row i of a request is node i; it sees the whole prefix, its
        ancestors and itself.
    """
    width = tree.tokens.shape[1]
    rows = [
        torch.cat([ancestors.new_ones((width, prefix_len)), ancestors], dim=1).flatten()
        for prefix_len, ancestors in zip(prefix_lens, tree.ancestors, strict=True)
    ]
    return torch.cat(rows)


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


def _ancestors(parents: torch.Tensor, max_depth: int) -> torch.Tensor:
    """Reflexive transitive closure of `parents`, bool [bs, W, W]: squaring doubles the distance it spans."""
    nodes = torch.arange(parents.shape[1], device=parents.device)
    closure = ((parents.unsqueeze(2) == nodes) | (nodes.unsqueeze(1) == nodes)).float()
    for _ in range(max(0, max_depth - 1).bit_length()):
        closure = (closure @ closure).clamp(max=1.0)
    return closure > 0
