# SPDX-License-Identifier: Apache-2.0
"""The best-first tree in one kernel launch: Algorithm 1 of arXiv 2604.12989 with a flat frontier instead of a heap.

One warp grows one request's tree. Popping node j puts its next sibling into the slot that it came from, and its first
child into slot j, so that a pop is two reductions over the slots: of the scores, then of the ties at the best one. Both
are of 32-bit integers, which a warp reduces in one instruction. Scores are the same float32 sums and ties fall the same
way (shallower, then earlier parent, then lower rank) as in `tree_reference.grow_by_beam`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from sglang.srt.speculative.ddtree.keys_kernel import ordered_key, value_of_key
from sglang.srt.speculative.ddtree.launching import launch
from sglang.srt.speculative.ddtree.tree import Tree
from sglang.srt.speculative.ddtree.tree_reference import grow_by_beam


#: A tie is (depth, parent, rank) in 6, 12 and 12 bits of a positive int32.
_PARENT_BITS, _RANK_BITS = 24, 12
MOST_NODES, MOST_POSITIONS = (1 << _RANK_BITS) - 1, (1 << 31 - _PARENT_BITS) - 2

#: One compiled kernel serves every batch and width: a step must not wait for a compiler.
_SIZES = ("root_stride", "horizon", "choices", "budget", "width")
_TENSORS = ("roots", "log_probs", "token_ids", "prefix_lens", "nodes", "grown_ranks", "grown_scores", "links", "mask")


@triton.jit
def _load_log_prob(pointer, mask):
    value = tl.load(pointer, mask=mask, other=float("-inf"))
    return tl.where(value == value, value, float("-inf"))


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_TENSORS)
def _grow_kernel(
    roots,  # int64 [bs], stride `root_stride`
    log_probs,  # float32 [bs, L, K], contiguous
    token_ids,  # int64 [bs, L, K], contiguous
    prefix_lens,  # integers [bs], or None
    nodes,  # int64 [4, bs, W] out: tokens, parents, depths, positions
    grown_ranks,  # int64 [bs, budget + 1] out
    grown_scores,  # float32 [bs, budget + 1] out
    links,  # int32 [2, bs, W] out: first children, next siblings; or None
    mask,  # uint8, flat, out: the tails of the ancestor mask; or None
    root_stride,
    horizon,
    choices,
    budget,
    width,
    SLOTS: tl.constexpr,  # a power of two, at least the budget and a warp
    SEED: tl.constexpr,  # 1: take the chain of first choices before anything else
):
    request = tl.program_id(0).to(tl.int64)
    plane = tl.num_programs(0).to(tl.int64) * width
    table = request * horizon * choices
    slots = tl.arange(0, SLOTS)
    row = request * width
    if links is not None:
        for tile in range(0, width, SLOTS):
            tl.store(links + row + tile + slots, -1, mask=tile + slots < width)
            tl.store(links + plane + row + tile + slots, -1, mask=tile + slots < width)
        tl.debug_barrier()  # other threads write over it

    never: tl.constexpr = -2139095041  # the key of -inf
    no_tie: tl.constexpr = 0x7FFFFFFF
    keys = tl.full([SLOTS], never, tl.int32)
    bases = tl.zeros([SLOTS], tl.float32)  # score of the parent
    ties = tl.zeros([SLOTS], tl.int32)
    owners = tl.zeros([SLOTS], tl.int32)  # the node popped last from the slot
    made_of = tl.full([SLOTS], -1, tl.int32)  # tie of node slot + 1, -1 where there is no node
    made_keys = tl.full([SLOTS], never, tl.int32)
    start = tl.program_id(0) * 0 + 1
    prefix = request * 0
    if prefix_lens is not None:
        prefix = tl.load(prefix_lens + request).to(tl.int64)
    # Row i of the mask, but for the root's column, is written one node late: it is its parent's row and its own bit,
    # and the parent's has to come from memory unless it is the row before.
    if mask is not None:
        before = request * width
        for tile in range(0, tl.program_id(0), SLOTS):
            others = tile + slots
            before += tl.sum(tl.load(prefix_lens + others, mask=others < request, other=0).to(tl.int64), axis=0)
        row_size = prefix + width
        cells = mask + width * before + prefix + 1 + slots
        shown = slots + 1 < width
        above = tl.zeros([SLOTS], tl.int32)  # the row before
        fetched = tl.zeros([SLOTS], tl.uint8)
        below_it = start  # 1: the parent is the node before

    if SEED:
        base = start.to(tl.float32) * 0.0
        last = tl.minimum(horizon, budget)
        for node in range(1, last + 1):
            at = log_probs + table + (node - 1) * choices
            score = base + _load_log_prob(at, start == node)
            key = ordered_key(tl.where(start == node, score, float("-inf")))
            going = key > never
            sibling = base + _load_log_prob(at + 1, going & (choices > 1))
            tie = ((node - 1) << 24) | ((node - 1) << 12)
            here = (slots == node - 1) & going
            keys = tl.where(here, ordered_key(sibling), keys)
            bases = tl.where(here, base, bases)
            ties = tl.where(here, tie + 1, ties)
            owners = tl.where(here, node, owners)
            made_of = tl.where(here, tie, made_of)
            made_keys = tl.where(here, key, made_keys)
            if links is not None:
                tl.store(links + row + node - 1, node, mask=going & (node < width))
            if mask is not None:
                tl.store(
                    cells + (node - 1) * row_size, (slots < node - 1).to(tl.uint8), mask=shown & going & (node <= width)
                )
            base = tl.where(going, score, base)
            start += going.to(tl.int32)
        if mask is not None:
            above = (slots < start - 2).to(tl.int32)
    else:
        first = ordered_key(_load_log_prob(log_probs + table, True))
        keys = tl.where(slots == 0, first, keys)

    for node in range(start, budget + 1):
        best = tl.max(keys, axis=0)
        alive = best > never
        order = tl.where(keys == best, ties, no_tie)
        tie = tl.min(order, axis=0)
        depth = tie >> 24
        rank = tie & 0xFFF
        popped = (order == tie) & alive
        score = value_of_key(best)
        at = log_probs + table + depth * choices
        sibling = _load_log_prob(at + rank + 1, alive & (rank + 1 < choices))
        child = _load_log_prob(at + choices, alive & (depth + 1 < horizon))
        if links is not None:
            tl.store(links + row + ((tie >> 12) & 0xFFF), node, mask=alive & (rank == 0) & (node < width))
            tl.store(links + plane + row + owners, node, mask=popped & (rank > 0) & (node < width))
            owners = tl.where(popped, node, owners)
        if mask is not None:
            above = tl.where(below_it > 0, above, fetched.to(tl.int32)) | (slots == node - 2).to(tl.int32)
            tl.store(cells + (node - 1) * row_size, above.to(tl.uint8), mask=shown & (node <= width))
            parent = (tie >> 12) & 0xFFF
            below_it = (alive & (parent == node - 1)).to(tl.int32)
            elsewhere = alive & (parent < node - 1) & (parent > 0) & (node < width)
            fetched = tl.load(cells + parent * row_size, mask=shown & elsewhere, other=0)
        made = slots == node - 1
        made_of = tl.where(made & alive, tie, made_of)
        made_keys = tl.where(made, best, made_keys)
        keys = tl.where(popped, ordered_key(bases + sibling), keys)
        ties = tl.where(popped, ties + 1, ties)
        born = (slots == node) & alive
        keys = tl.where(born, ordered_key(score + child), keys)
        bases = tl.where(born, score, bases)
        ties = tl.where(born, ((depth + 1) << 24) | (node << 12), ties)

    root = tl.load(roots + request * root_stride)
    real = made_of >= 0
    if mask is not None:
        above = tl.where(below_it > 0, above, fetched.to(tl.int32)) | (slots == budget - 1).to(tl.int32)
        tl.store(cells + budget * row_size, above.to(tl.uint8), mask=shown & (budget < width))
        roots_column = mask + width * before + prefix
        tl.store(roots_column + (slots + 1) * row_size, real.to(tl.uint8), mask=shown)
        tl.store(roots_column, (start > 0).to(tl.uint8))
    grown = slots < budget
    depths = tl.where(real, made_of >> 24, -1).to(tl.int64) + 1
    ranks = tl.where(real, made_of & 0xFFF, 0).to(tl.int64)
    tokens = tl.load(token_ids + table + (depths - 1) * choices + ranks, mask=real & grown, other=0)
    cut = slots + 1 < width
    out = nodes + row + slots + 1
    tl.store(out, tl.where(real, tokens, root), mask=cut)
    tl.store(out + plane, tl.where(real, (made_of >> 12) & 0xFFF, -1).to(tl.int64), mask=cut)
    tl.store(out + 2 * plane, depths, mask=cut)
    tl.store(out + 3 * plane, prefix + depths, mask=cut)
    grown_row = request * (budget + 1)
    tl.store(grown_ranks + grown_row + slots + 1, ranks, mask=grown)
    tl.store(grown_scores + grown_row + slots + 1, value_of_key(made_keys), mask=grown)
    tl.store(nodes + row, root)
    tl.store(nodes + plane + row, request * 0 - 1)
    tl.store(nodes + 2 * plane + row, request * 0)
    tl.store(nodes + 3 * plane + row, prefix)
    tl.store(grown_ranks + grown_row, request * 0)
    tl.store(grown_scores + grown_row, 0.0)


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
    mask: torch.Tensor | None = None,
) -> Tree:
    """Grow the tree of every request; arguments and result as in `tree_reference.grow_by_beam`."""
    batch, horizon, choices = log_probs.shape
    if budget > MOST_NODES or choices > MOST_NODES or horizon > MOST_POSITIONS:
        return grow_by_beam(
            roots,
            log_probs,
            token_ids,
            budget,
            width=width,
            prefix_lens=prefix_lens,
            chain_seed=chain_seed,
            links=links,
            mask=mask,
        )
    width = budget + 1 if width is None else width
    device = log_probs.device
    whole = width == budget + 1
    planes = torch.empty((5 if whole else 4, batch, width), dtype=torch.int64, device=device).unbind(0)
    tokens, parents, depths, positions = planes[:4]
    ranks = planes[4] if whole else torch.empty((batch, budget + 1), dtype=torch.int64, device=device)
    scores = torch.empty((batch, budget + 1), dtype=torch.float32, device=device)
    linked = torch.empty((2, batch, width), dtype=torch.int32, device=device) if links else None
    cells = mask if mask is None or mask.dtype == torch.uint8 else mask.view(torch.uint8)
    args = (roots, log_probs.contiguous(), token_ids.contiguous(), prefix_lens, tokens, ranks, scores, linked, cells)
    sizes = (roots.stride(0), horizon, choices, budget, width)
    constants = {"SLOTS": max(32, triton.next_power_of_2(budget)), "SEED": int(chain_seed)}
    launch(
        _grow_kernel,
        (batch, 1, 1),
        args + sizes,
        constants,
        num_warps=1,
        key=(links, mask is None, None if prefix_lens is None else prefix_lens.dtype),
    )
    first_child, next_sibling = (None, None) if linked is None else linked.unbind(0)
    return Tree(
        tokens=tokens,
        parents=parents,
        depths=depths,
        ranks=ranks if whole else ranks[:, :width],
        positions=positions,
        scores=scores if whole else scores[:, :width],
        max_depth=min(horizon, width - 1),
        grown_scores=scores,
        grown_ranks=ranks,
        first_child=first_child,
        next_sibling=next_sibling,
    )
