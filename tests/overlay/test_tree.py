# SPDX-License-Identifier: Apache-2.0
"""The best-first tree against brute force and against the paper's heap."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.speculative.ddtree.accept import accept
from sglang.srt.speculative.ddtree.tree import Tree, build_tree, is_exact, ordered_topk
from sglang.srt.speculative.ddtree.tree_kernel import grow_trees
from sglang.srt.speculative.ddtree.tree_mask import verify_mask
from sglang.srt.speculative.ddtree.tree_reference import grow_by_beam


def sorted_choices(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    log_probs = torch.log_softmax(logits, dim=-1)
    return ordered_topk(log_probs, min(k, logits.shape[-1]))


def tree_of(logits: torch.Tensor, budget: int, cap: int | None = None, *, chain_seed: bool = False) -> Tree:
    """The tree of logits [bs, L, V]; bonus tokens count up from V."""
    values, ids = sorted_choices(logits, budget if cap is None else cap)
    roots = torch.arange(logits.shape[0]) + logits.shape[-1]
    return build_tree(roots, values, ids, budget, chain_seed=chain_seed)


def prefixes(tree: Tree, row: int) -> list[tuple[int, ...]]:
    """Token path of each real node but the root, in node order."""
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, tree.tokens.shape[1]):
        parent = int(tree.parents[row, node])
        if parent >= 0:
            paths[node] = (*paths[parent], int(tree.tokens[row, node]))
    return [paths[node] for node in sorted(paths) if node]


def every_prefix(values: torch.Tensor, ids: torch.Tensor) -> list[tuple[float, tuple[int, ...]]]:
    """All reachable prefixes of one request, best first, in the documented order; nothing is pruned."""
    level = [(torch.tensor(0.0), ())]
    ordered: list[tuple[float, int, tuple[int, ...]]] = []
    for depth in range(values.shape[0]):
        extended = [
            (score + values[depth, rank], (*path, int(ids[depth, rank])))
            for score, path in level
            for rank in range(values.shape[1])
        ]
        level = sorted((e for e in extended if e[0] > float("-inf")), key=lambda e: -float(e[0]))  # stable
        ordered += [(float(score), depth, path) for score, path in level]
    ordered.sort(key=lambda e: (-e[0], e[1]))  # stable
    return [(score, path) for score, _, path in ordered]


def heap_tree(values: torch.Tensor, ids: torch.Tensor, budget: int) -> set[tuple[int, ...]]:
    """Algorithm 1 of the paper with float64 scores, for inputs without ties."""
    lp, out = values.double().tolist(), set()
    heap = [(-lp[0][0], (0,), 0.0)]
    while heap and len(out) < budget:
        score, ranks, parent_score = heapq.heappop(heap)
        depth = len(ranks) - 1
        out.add(tuple(int(ids[d, r]) for d, r in enumerate(ranks)))
        if ranks[-1] + 1 < len(lp[depth]):
            heapq.heappush(
                heap, (-(parent_score + lp[depth][ranks[-1] + 1]), (*ranks[:-1], ranks[-1] + 1), parent_score)
            )
        if depth + 1 < len(lp):
            heapq.heappush(heap, (score - lp[depth + 1][0], (*ranks, 0), -score))
    return out


@st.composite
def small_logits(draw: st.DrawFn) -> torch.Tensor:
    """Logits [2, L, V] small enough to enumerate, with many ties, and rows that hold -inf."""
    horizon, vocab = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    numbers = st.one_of(st.integers(-3, 3).map(float), st.floats(-4, 4, width=32), st.just(float("-inf")))
    flat = draw(st.lists(numbers, min_size=2 * horizon * vocab, max_size=2 * horizon * vocab))
    logits = torch.tensor(flat).view(2, horizon, vocab)
    logits[..., 0] = logits[..., 0].clamp(min=-3.0)  # log_softmax of a row of -inf alone is NaN: tested on its own
    return logits


@settings(max_examples=150, deadline=None)
@given(logits=small_logits(), budget=st.integers(1, 40))
def test_tree_is_the_best_prefixes_in_order(logits: torch.Tensor, budget: int) -> None:
    """Nodes are exactly the `budget` best prefixes of an exhaustive enumeration, ties included, scores bit for bit."""
    tree = tree_of(logits, budget)
    for row in range(2):
        best = every_prefix(*(part[row] for part in sorted_choices(logits, budget)))[:budget]
        assert prefixes(tree, row) == [path for _, path in best]
        assert tree.scores[row, 1 : len(best) + 1].tolist() == [score for score, _ in best]


@settings(max_examples=80, deadline=None)
@given(logits=small_logits(), budget=st.integers(1, 40))
def test_tree_invariants_hold(logits: torch.Tensor, budget: int) -> None:
    """Parents precede children, siblings differ, depth counts ancestors, and padding sees itself alone."""
    tree = tree_of(logits, budget)
    assert tree.tokens.shape == (2, budget + 1)
    for row in range(2):
        parents, depths, tokens = (getattr(tree, name)[row].tolist() for name in ("parents", "depths", "tokens"))
        closure = tree.ancestors[row]
        children: set[tuple[int, int]] = set()
        for node in range(1, budget + 1):
            if parents[node] < 0:  # padding
                assert closure[node].nonzero().flatten().tolist() == [node]
                assert all(parent < 0 for parent in parents[node:])
                continue
            assert parents[node] < node
            assert depths[node] == depths[parents[node]] + 1
            assert (parents[node], tokens[node]) not in children
            children.add((parents[node], tokens[node]))
            path, current = [node], node
            while current:
                current = parents[current]
                path.append(current)
            assert closure[node].nonzero().flatten().tolist() == sorted(path)
            assert int(closure[node].sum()) == depths[node] + 1


@settings(max_examples=80, deadline=None)
@given(logits=small_logits(), budget=st.integers(1, 40))
def test_seeded_tree_is_the_chain_and_the_best_other_prefixes(logits: torch.Tensor, budget: int) -> None:
    """The chain of first choices comes first, then every other prefix in its order, each behind its parent."""
    tree = tree_of(logits, budget, chain_seed=True)
    for row in range(2):
        ranked = [path for _, path in every_prefix(*(part[row] for part in sorted_choices(logits, budget)))]
        values, ids = (part[row] for part in sorted_choices(logits, budget))
        alive = (values[:, 0] > float("-inf")).long().cumprod(0).sum()
        chain = [tuple(ids[: depth + 1, 0].tolist()) for depth in range(int(alive))]
        assert prefixes(tree, row) == [*chain, *(path for path in ranked if path not in chain)][:budget]
        parents = tree.parents[row]
        assert all(int(parents[node]) < node for node in range(1, budget + 1))


@settings(max_examples=60, deadline=None)
@given(logits=small_logits(), spare=st.integers(0, 20), seed=st.integers(0, 1000))
def test_no_target_accepts_less_of_a_seeded_tree_than_of_the_chain(logits: torch.Tensor, spare: int, seed: int) -> None:
    """Whatever the target says, every node of the chain is there (a best-first tree may lack it: {a, b, c, aa})."""
    horizon = logits.shape[1]
    tree = tree_of(logits, horizon + spare, chain_seed=True)
    chain = tree_of(logits, horizon, cap=1)
    by_prefix = TargetOfPrefixes(logits.shape[-1], seed)
    for row in range(2):
        lengths = [accepted(t, by_prefix.tokens(t))[row] for t in (tree, chain)]
        assert lengths[0] >= lengths[1]


def accepted(tree: Tree, targets: torch.Tensor) -> list[int]:
    """Accepted draft tokens of each request."""
    prefix_lens = torch.zeros(len(targets), dtype=torch.int64)
    acceptance = accept(tree, targets, prefix_lens=prefix_lens, block_size=tree.max_depth + 1)
    return acceptance.accept_lens.tolist()


class TargetOfPrefixes:
    """A target whose next token depends on the whole prefix, as a model's does."""

    def __init__(self, vocabulary: int, seed: int) -> None:
        self._vocabulary = vocabulary
        self._seed = seed

    def tokens(self, tree: Tree) -> torch.Tensor:
        """Its token after each node, int64 [bs, W]."""
        chosen = torch.zeros_like(tree.tokens)
        for row in range(tree.tokens.shape[0]):
            paths = {0: ()}
            for node in range(tree.tokens.shape[1]):
                parent = int(tree.parents[row, node])
                if parent >= 0:
                    paths[node] = (*paths[parent], int(tree.tokens[row, node]))
                chosen[row, node] = hash((self._seed, row, paths.get(node))) % self._vocabulary
        return chosen


def test_flat_drafts_leave_the_chain_out_of_a_best_first_tree() -> None:
    """Four equal choices at every position: the best four nodes are four children of the root, not a chain."""
    logits = torch.zeros(1, 4, 4)
    assert int(tree_of(logits, 4).depths.max()) == 1
    assert int(tree_of(logits, 4, chain_seed=True).depths.max()) == 4


@settings(max_examples=100, deadline=None)
@given(logits=small_logits(), budget=st.integers(1, 12), cap=st.integers(1, 4), chain_seed=st.booleans())
def test_certificate_of_a_cap_is_never_wrong(logits: torch.Tensor, budget: int, cap: int, chain_seed: bool) -> None:
    """Where it is given, the capped tree has the scores of the tree without a cap."""
    values, ids = sorted_choices(logits, cap)
    capped = build_tree(torch.tensor([7, 8]), values, ids, budget, chain_seed=chain_seed)
    whole = tree_of(logits, budget, chain_seed=chain_seed)
    exact = is_exact(capped, values, chain_seed=chain_seed)
    for row in range(2):
        if exact[row]:
            assert sorted(capped.scores[row].tolist()) == sorted(whole.scores[row].tolist())


def test_certificate_is_given_where_a_cap_cuts_nothing_that_counts() -> None:
    """Confident drafts need few choices a position, flat ones need all."""
    torch.manual_seed(0)
    confident, flat = torch.randn(1, 4, 50) * 8, torch.zeros(1, 4, 50)
    for logits, expected in ((confident, True), (flat, False)):
        values, ids = sorted_choices(logits, 4)
        tree = build_tree(torch.tensor([50]), values, ids, 6)
        assert is_exact(tree, values).tolist() == [expected]


@settings(max_examples=60, deadline=None)
@given(logits=small_logits(), budget=st.integers(1, 40))
def test_scores_sum_to_the_expected_accept_length(logits: torch.Tensor, budget: int) -> None:
    """Under the drafter's own distribution the probabilities of the nodes add up to the accepted tokens of a step."""
    tree = tree_of(logits, budget)
    log_probs = torch.log_softmax(logits.double(), -1)
    vocabulary = logits.shape[-1]
    for row in range(2):
        nodes = set(prefixes(tree, row))
        expected = 0.0
        for tokens in itertools.product(range(vocabulary), repeat=logits.shape[1]):
            probability = float(log_probs[row, range(len(tokens)), tokens].sum().exp())
            accepted = next((d for d in range(len(tokens)) if tokens[: d + 1] not in nodes), len(tokens))
            expected += probability * accepted
        assert float(tree.scores[row, 1:].exp().sum()) == pytest.approx(expected, abs=1e-4)


@settings(max_examples=60, deadline=None)
@given(logits=small_logits(), budget=st.integers(1, 30))
def test_no_node_needs_more_choices_than_its_depth_leaves(logits: torch.Tensor, budget: int) -> None:
    """Each better-ranked prefix of a node's ancestors is in the tree too, so a node of depth d has rank <= B - d."""
    tree = tree_of(logits, budget)
    real = tree.parents >= 0
    assert (tree.ranks[real] <= budget - tree.depths[real]).all()


@settings(max_examples=30, deadline=None)
@given(logits=small_logits(), budget=st.integers(1, 40), chain_seed=st.booleans())
def test_kernel_equals_the_reference(logits: torch.Tensor, budget: int, chain_seed: bool) -> None:
    """The Triton kernel (interpreted here) gives the reference's tree bit for bit: ties, -inf and padding included."""
    values, ids = sorted_choices(logits, budget)
    assert_kernel_equals_reference(torch.tensor([7, 8]), values, ids, budget, chain_seed)


@pytest.mark.parametrize("chain_seed", [False, True])
@pytest.mark.parametrize("budget", [1, 15, 63, 130])
def test_kernel_equals_the_reference_at_odd_widths(budget: int, chain_seed: bool) -> None:
    """Widths around powers of two, NaN rows, tied logits."""
    torch.manual_seed(budget)
    logits = (torch.randn(2, 5, 150) * 2).round()
    logits[1, 3] = float("nan")
    values, ids = torch.sort(torch.log_softmax(logits, -1), dim=-1, descending=True, stable=True)
    values, ids = values[..., :budget], ids[..., :budget]
    assert_kernel_equals_reference(torch.tensor([500, 501]), values, ids, budget, chain_seed)


def assert_kernel_equals_reference(
    roots: torch.Tensor, values: torch.Tensor, ids: torch.Tensor, budget: int, chain_seed: bool
) -> None:
    """Every array, links and positions included."""
    options = {"prefix_lens": torch.arange(len(roots)) * 30, "chain_seed": chain_seed, "links": budget % 2 == 1}
    got, expected = (grow(roots, values, ids, budget, **options) for grow in (grow_trees, grow_by_beam))
    for field in fields(Tree):
        mine, other = getattr(got, field.name), getattr(expected, field.name)
        assert torch.equal(mine, other) if isinstance(mine, torch.Tensor) else mine == other, field.name


@pytest.mark.parametrize("seed", range(8))
def test_tree_equals_the_papers_heap(seed: int) -> None:
    """On continuous log-probabilities the beam finds the same nodes as Algorithm 1's heap."""
    torch.manual_seed(seed)
    logits = torch.randn(3, 7, 60) * 3
    for budget in (1, 5, 16, 64):
        tree = tree_of(logits, budget)
        values, ids = sorted_choices(logits, budget)
        for row in range(3):
            assert set(prefixes(tree, row)) == heap_tree(values[row], ids[row], budget)


@pytest.mark.parametrize("chain_seed", [False, True])
def test_smaller_budgets_are_prefixes_of_larger_trees(chain_seed: bool) -> None:
    """The first m nodes of a tree are the tree of budget m, so one build serves every width."""
    torch.manual_seed(0)
    logits = torch.randn(2, 6, 40).round()  # ties
    large = tree_of(logits, 48, chain_seed=chain_seed)
    values, ids = sorted_choices(logits, 48)
    roots, options = torch.arange(2) + 40, {"chain_seed": chain_seed, "links": True}
    for budget in (1, 2, 7, 31):
        small = build_tree(roots, values, ids, budget, **options)
        cut = build_tree(roots, values, ids, 48, width=budget + 1, **options)
        for name in ("tokens", "parents", "depths", "ranks", "positions", "scores", "first_child", "next_sibling"):
            assert torch.equal(getattr(small, name), getattr(cut, name)), name
        assert small.max_depth == cut.max_depth
        assert torch.equal(cut.grown_scores, large.scores)
        assert torch.equal(cut.grown_ranks, large.ranks)


def test_one_choice_a_position_is_the_chain_of_first_choices() -> None:
    """With a top-k cap of 1 the tree is DFLASH's chain, cut to the budget."""
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 30)
    for budget in (3, 5, 9):
        tree = tree_of(logits, budget, cap=1)
        depth = min(5, budget)
        assert torch.equal(tree.tokens[:, 1 : depth + 1], logits.argmax(-1)[:, :depth])
        assert tree.parents[0, : depth + 1].tolist() == [-1, *range(depth)]
        assert (tree.parents[:, depth + 1 :] == -1).all()


def test_nan_row_ends_the_tree_at_its_depth() -> None:
    """A row of NaN is read as -inf: no node at or below that depth (NaN silently breaks a heap's order)."""
    logits = torch.randn(1, 4, 6)
    logits[0, 2] = float("nan")
    values, ids = torch.log_softmax(logits, -1).sort(descending=True, dim=-1)
    tree = build_tree(torch.tensor([9]), values, ids, 60)
    assert int(tree.depths.max()) == 2
    assert int((tree.parents[0] >= 0).sum()) == 6 + 36


def test_token_zero_is_an_ordinary_token() -> None:
    """Tree size comes from counts, never from `token != 0` (sglang#27509)."""
    logits = torch.full((1, 3, 4), -5.0)
    logits[..., 0] = 5.0
    tree = tree_of(logits, 6)
    assert tree.tokens[0, 1:4].tolist() == [0, 0, 0]
    assert int((tree.parents[0] >= 0).sum()) == 6


def test_rows_do_not_influence_each_other() -> None:
    """Permuting the requests of a batch permutes the trees."""
    torch.manual_seed(1)
    logits = torch.randn(4, 6, 20).round()
    order = torch.tensor([2, 0, 3, 1])
    tree, permuted = tree_of(logits, 20), tree_of(logits[order], 20)
    assert torch.equal(tree.tokens[order][:, 1:], permuted.tokens[:, 1:])
    assert torch.equal(tree.ancestors[order], permuted.ancestors)


def test_ordered_topk_breaks_ties_by_index() -> None:
    """Equal values keep the order of their indices, -0.0 equals 0.0, and -inf comes last."""
    values = torch.tensor([[1.0, 0.0, 3.0, -0.0, 3.0, float("-inf"), -2.0]])
    best, indices = ordered_topk(values, 7)
    assert indices.tolist() == [[2, 4, 0, 1, 3, 6, 5]]
    assert best.tolist() == [[3.0, 3.0, 1.0, 0.0, -0.0, -2.0, float("-inf")]]


def test_verify_mask_is_ragged_and_bool() -> None:
    """Each request gets W x (prefix + W) entries: the prefix is visible, the tail is the ancestor matrix."""
    torch.manual_seed(2)
    tree = tree_of(torch.randn(2, 3, 9), 5)
    mask = verify_mask(tree, [4, 0])
    assert mask.dtype == torch.bool
    first, second = mask[: 6 * 10].view(6, 10), mask[6 * 10 :].view(6, 6)
    assert first[:, :4].all()
    assert torch.equal(first[:, 4:], tree.ancestors[0])
    assert torch.equal(second, tree.ancestors[1])
