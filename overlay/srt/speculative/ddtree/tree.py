# SPDX-License-Identifier: Apache-2.0
"""Best-first draft trees from per-position log-probabilities (Algorithm 1 of arXiv 2604.12989), for a whole batch.

On a GPU `tree_kernel` grows it in one launch; `tree_reference` says with tensor operations what it has to be.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Tree:
    """One tree per request; W = budget + 1 nodes, in order of falling score, node 0 the root (the bonus token).

    A parent's index is below its children's, and the first m nodes are the tree of budget m - 1. A seeded tree begins
    with the chain of first choices, whatever the scores. A tree with fewer reachable nodes than the budget ends in
    padding: nodes without a parent that see only themselves and can never be accepted.
    """

    #: Token ids, int64 [bs, W]; padding repeats the root's.
    tokens: torch.Tensor
    #: Index of the parent node, -1 for the root and for padding, int64 [bs, W].
    parents: torch.Tensor
    #: Distance from the root, int64 [bs, W].
    depths: torch.Tensor
    #: Rank of the token among the drafter's choices at its depth, 0 = first choice, int64 [bs, W].
    ranks: torch.Tensor
    #: Position of each node in its text: committed tokens + depth, int64 [bs, W].
    positions: torch.Tensor
    #: Log-probability of the prefix under the drafter, float32 [bs, W]; 0 for the root, -inf for padding.
    scores: torch.Tensor
    #: Most draft tokens a path can hold, known from the shapes alone.
    max_depth: int
    #: Scores and ranks of the tree that this one is the beginning of, as far as it was grown, float32 and int64
    #: [bs, G], G at least W. `scores` and `ranks` are their first W columns.
    grown_scores: torch.Tensor
    grown_ranks: torch.Tensor
    #: First child and next sibling of each node, -1 where there is none, int32 [bs, W]; None unless asked for.
    first_child: torch.Tensor | None = None
    next_sibling: torch.Tensor | None = None

    @property
    def width(self) -> int:
        """Nodes per request, W."""
        return self.tokens.shape[1]

    @property
    def ancestors(self) -> torch.Tensor:
        """[b, i, j] = node j is node i or an ancestor of it, bool [bs, W, W]. Costs many launches: not for a step."""
        return _ancestors(self.parents, self.max_depth)

    def first(self, width: int) -> Tree:
        """The tree of the first `width` nodes, from 1 up to W. Its arrays are views; none of them is moved.

        Where a step is going to verify fewer nodes than are grown, `build_tree` lays that smaller tree out in one
        piece: it is to be preferred.
        """
        if not 1 <= width <= self.width:
            raise IndexError(f"DDTREE: a tree of {self.width} nodes has no first {width}")
        names = ("tokens", "parents", "depths", "ranks", "positions", "scores")
        cut = {name: getattr(self, name)[:, :width] for name in names}
        for name in ("first_child", "next_sibling"):
            link = getattr(self, name)
            cut[name] = None if link is None else link[:, :width].masked_fill(link[:, :width] >= width, -1)
        return replace(self, **cut, max_depth=min(self.max_depth, width - 1))


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
    """Build the best-first tree of every request: on a GPU in one launch, which nothing has to prepare.

    Args:
        roots: Bonus tokens, int64 [bs], any stride.
        log_probs: float32 [bs, L, K], falling along K, at most 0, -inf where there is no token; NaN is read as -inf.
        token_ids: int64 [bs, L, K], distinct along K.
        budget: Draft nodes to grow, at least 1.
        width: Nodes of the tree that is returned, at most and by default budget + 1; of the rest only scores and ranks
            are kept, as `grown_scores` and `grown_ranks`.
        prefix_lens: Committed tokens of each request, integers [bs]; None for positions that are depths.
        chain_seed: Take the chain of first choices, DFLASH's draft, before anything else. Then no target accepts less
            of the tree than of the chain, at the price of branches that the drafter thinks likelier.
        links: Whether to link first children and next siblings, which recurrent layers read.
        mask: Flat mask, bool or uint8, into which to write the tails of the returned tree, as
            `tree_mask.write_tree_mask` does; or None. It needs `prefix_lens`.
    """
    if log_probs.is_cuda:
        from sglang.srt.speculative.ddtree.tree_kernel import grow_trees as grow
    else:
        from sglang.srt.speculative.ddtree.tree_reference import grow_by_beam as grow
    return grow(
        roots,
        log_probs,
        token_ids,
        budget,
        width=budget + 1 if width is None else width,
        prefix_lens=prefix_lens,
        chain_seed=chain_seed,
        links=links,
        mask=mask,
    )


def root_tree(roots: torch.Tensor, prefix_lens: torch.Tensor, *, links: bool = False) -> Tree:
    """The tree of a step that drafts nothing: the root alone.

    Args:
        roots: Bonus tokens, int64 [bs].
        prefix_lens: Committed tokens of each request, integers [bs].
        links: Whether to say that it has no child and no sibling.
    """
    tokens = roots.to(torch.int64).reshape(-1, 1)
    zeros, scores = torch.zeros_like(tokens), torch.zeros_like(tokens, dtype=torch.float32)
    none = torch.full_like(tokens, -1, dtype=torch.int32) if links else None
    return Tree(
        tokens=tokens,
        parents=zeros - 1,
        depths=zeros,
        ranks=zeros,
        positions=prefix_lens.to(torch.int64).reshape(-1, 1),
        scores=scores,
        max_depth=0,
        grown_scores=scores,
        grown_ranks=zeros,
        first_child=none,
        next_sibling=none,
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


def _ancestors(parents: torch.Tensor, max_depth: int) -> torch.Tensor:
    """Reflexive transitive closure of `parents`, bool [bs, W, W]: squaring doubles the distance it spans."""
    nodes = torch.arange(parents.shape[1], device=parents.device)
    closure = ((parents.unsqueeze(2) == nodes) | (nodes.unsqueeze(1) == nodes)).float()
    for _ in range(max(0, max_depth - 1).bit_length()):
        closure = (closure @ closure).clamp(max=1.0)
    return closure > 0
