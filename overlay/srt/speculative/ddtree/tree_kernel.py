# SPDX-License-Identifier: Apache-2.0
"""The best-first tree in one kernel launch: Algorithm 1 of arXiv 2604.12989 with a flat frontier instead of a heap.

One program grows one request's tree. Popping node j puts its next sibling into the slot that it came from, and its
first child into slot j; a pop is two reductions over the slots. Scores are the same float32 sums, and ties fall the
same way (shallower, then earlier parent, then lower rank), as in `tree.grow_by_beam`, which is the reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from sglang.srt.speculative.ddtree.tree import Tree
from sglang.srt.speculative.ddtree.tree_reference import tree_links


@triton.jit
def _grow_kernel(
    log_probs,  # float32 [bs, L, K], contiguous
    token_ids,  # int64 [bs, L, K], contiguous
    out_tokens,  # int64 [bs, B + 1]; column 0 and padding hold the root's token
    out_parents,  # int64 [bs, B + 1]; all -1 before
    out_depths,  # int64 [bs, B + 1]; all 0 before
    out_ranks,  # int64 [bs, B + 1]; all 0 before
    out_scores,  # float32 [bs, B + 1]; 0 for the root, -inf elsewhere, before
    horizon,
    choices,
    BUDGET: tl.constexpr,
    SLOTS: tl.constexpr,
    SEED: tl.constexpr,  # 1: take the chain of first choices before anything else
):
    request = tl.program_id(0)
    table = request.to(tl.int64) * horizon * choices
    row = request.to(tl.int64) * (BUDGET + 1)
    slots = tl.arange(0, SLOTS)

    never = float("-inf")
    scores = tl.full([SLOTS], never, tl.float32)
    bases = tl.zeros([SLOTS], tl.float32)  # score of the parent
    parents = tl.zeros([SLOTS], tl.int32)
    depths = tl.zeros([SLOTS], tl.int32)  # 0-based position of the token
    ranks = tl.zeros([SLOTS], tl.int32)
    scores = tl.where(slots == 0, tl.load(log_probs + table), scores)
    on_chain = request * 0 + SEED

    for node in range(1, BUDGET + 1):
        # The chain goes on in the slot of the node before: its first child, while there is one.
        next_of_chain = tl.max(tl.where(slots == node - 1, scores, never), axis=0)
        on_chain = on_chain & (next_of_chain > never).to(tl.int32)
        eligible = tl.where((on_chain > 0) & (slots != node - 1), never, scores)
        best = tl.max(eligible, axis=0)
        if best > never:
            # (depth, parent, rank) of the slots that share the best score; every field fits its bits.
            order = (depths.to(tl.int64) << 40) | (parents.to(tl.int64) << 20) | ranks.to(tl.int64)
            order = tl.where(eligible == best, order, 1 << 62)
            first = tl.min(order, axis=0)
            depth = (first >> 40).to(tl.int32)
            parent = ((first >> 20) & 0xFFFFF).to(tl.int32)
            rank = (first & 0xFFFFF).to(tl.int32)
            popped = order == first
            base = tl.sum(tl.where(popped, bases, 0.0), axis=0)

            at = table + depth * choices + rank
            tl.store(out_tokens + row + node, tl.load(token_ids + at))
            tl.store(out_parents + row + node, parent.to(tl.int64))
            tl.store(out_depths + row + node, depth.to(tl.int64) + 1)
            tl.store(out_ranks + row + node, rank.to(tl.int64))
            tl.store(out_scores + row + node, best)

            sibling = tl.load(log_probs + at + 1, mask=rank + 1 < choices, other=never)
            child = tl.load(log_probs + table + (depth + 1) * choices, mask=depth + 1 < horizon, other=never)
            scores = tl.where(popped, base + sibling, scores)
            ranks = tl.where(popped, rank + 1, ranks)
            born = slots == node
            scores = tl.where(born, best + child, scores)
            bases = tl.where(born, best, bases)
            parents = tl.where(born, node, parents)
            depths = tl.where(born, depth + 1, depths)


def grow_trees(
    roots: torch.Tensor,
    log_probs: torch.Tensor,
    token_ids: torch.Tensor,
    budget: int,
    *,
    width: int | None = None,
    prefix_lens: torch.Tensor | None = None,
    chain_seed: bool = False,
    links: bool = False,
) -> Tree:
    """Grow the tree of every request; arguments and result as in `tree_reference.grow_by_beam`."""
    batch, horizon, choices = log_probs.shape
    verified, width = width, budget + 1
    tokens = roots.to(torch.int64).unsqueeze(1).repeat(1, width)
    parents = tokens.new_full((batch, width), -1)
    depths, ranks = tokens.new_zeros((2, batch, width))
    scores = log_probs.new_full((batch, width), float("-inf"))
    scores[:, 0] = 0.0
    _grow_kernel[(batch,)](
        log_probs.masked_fill(log_probs.isnan(), float("-inf")).contiguous(),
        token_ids.contiguous(),
        tokens,
        parents,
        depths,
        ranks,
        scores,
        horizon,
        choices,
        BUDGET=budget,
        SLOTS=triton.next_power_of_2(width),
        SEED=int(chain_seed),
        num_warps=1 if budget <= 64 else 4,
    )
    first_child, next_sibling = tree_links(parents) if links else (None, None)
    tree = Tree(
        tokens=tokens,
        parents=parents,
        depths=depths,
        ranks=ranks,
        positions=depths if prefix_lens is None else prefix_lens.unsqueeze(1) + depths,
        scores=scores,
        max_depth=min(horizon, budget),
        grown_scores=scores,
        grown_ranks=ranks,
        first_child=first_child,
        next_sibling=next_sibling,
    )
    return tree if verified is None else tree.first(verified)
