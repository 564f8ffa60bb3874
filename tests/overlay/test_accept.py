# SPDX-License-Identifier: Apache-2.0
"""The accept walk against a walk written out node by node, and its losslessness under sampling."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from scipy import stats
from sglang.srt.layers.sampler import Sampler
from sglang.srt.speculative.ddtree import targets
from sglang.srt.speculative.ddtree.accept import Acceptance, accept
from sglang.srt.speculative.ddtree.nan_logits import replaces_nan
from sglang.srt.speculative.ddtree.targets import TargetChooser
from sglang.srt.speculative.ddtree.tree import Tree, build_tree, ordered_topk
from tests.overlay.publishing import publish


ONE_RANK = SimpleNamespace(world_size=1)


def accept_paths(tree: Tree, targets: torch.Tensor, root_only: torch.Tensor | None = None) -> Acceptance:
    """An acceptance whose lengths and blocks do not matter."""
    prefix_lens = torch.zeros(len(targets), dtype=torch.int64)
    return accept(tree, targets, prefix_lens=prefix_lens, block_size=tree.max_depth + 1, root_only=root_only)


def walk(tree: Tree, targets: torch.Tensor, row: int) -> tuple[list[int], int]:
    """Path from the root, and bonus token."""
    path = [0]
    while True:
        token = int(targets[row, path[-1]])
        children = [n for n, parent in enumerate(tree.parents[row].tolist()) if n and parent == path[-1]]
        match = [n for n in children if int(tree.tokens[row, n]) == token]
        if not match:
            return path, token
        path += match


@pytest.mark.parametrize("budget", [1, 2, 7, 33])
def test_accepted_path_is_the_walk_of_target_tokens(budget: int) -> None:
    """Path, length and bonus equal a node-by-node walk: no, some and full acceptance in one batch (sglang#26866)."""
    torch.manual_seed(budget)
    log_probs, ids = ordered_topk(torch.log_softmax(torch.randn(32, 5, 4), -1), min(budget, 4))
    tree = build_tree(torch.full((32,), 7), log_probs, ids, budget)
    targets = torch.randint(0, 4, tree.tokens.shape)
    targets[0] = 99  # nothing accepted
    node = deepest = int(tree.depths[1].argmax())
    while node:  # the deepest path accepted whole
        parent = int(tree.parents[1, node])
        targets[1, parent] = tree.tokens[1, node]
        node = parent
    targets[1, deepest] = 99
    acceptance = accept_paths(tree, targets)
    lengths = set()
    for row in range(32):
        path, bonus = walk(tree, targets, row)
        assert acceptance.path[row].tolist() == path + [-1] * (tree.max_depth + 1 - len(path))
        assert int(acceptance.accept_lens[row]) == len(path) - 1
        assert int(acceptance.bonus[row]) == bonus
        lengths.add(len(path) - 1)
    assert {0, int(tree.depths[1, deepest])} <= lengths


def test_padding_is_never_accepted() -> None:
    """A padding node repeats the root's token; a target that asks for that token must not reach it."""
    tree = build_tree(torch.tensor([5]), torch.zeros(1, 2, 1), torch.tensor([[[1], [2]]]), 6)
    assert (tree.parents[0, 3:] == -1).all()
    acceptance = accept_paths(tree, torch.full((1, 7), 5))
    assert acceptance.path[0].tolist() == [0, -1, -1]


def sampling(batch: int, **changed: object) -> SimpleNamespace:
    """Sampling parameters of a batch as SGLang's SamplingBatchInfo carries them."""
    base: dict[str, object] = {
        "is_all_greedy": False,
        "temperatures": torch.ones(batch, 1),
        "top_ps": torch.ones(batch),
        "top_ks": torch.full((batch,), 1 << 30, dtype=torch.int32),
        "min_ps": torch.zeros(batch),
        "sampling_seed": None,
        "need_top_p_sampling": False,
        "need_top_k_sampling": False,
        "need_min_p_sampling": False,
    }
    found = SimpleNamespace(**(base | changed))
    found.max_top_k = int(found.top_ks.max())
    return found


#: Newer releases hash seeds on a CPU with an operation of `sgl_kernel`, which the tests' stand-in has not.
seeded = pytest.mark.skipif(find_spec("sglang.kernels") is not None, reason="seeds need sgl_kernel in this release")


@pytest.fixture
def sampler() -> Sampler:
    """The engine's own sampler, with the PyTorch backend."""
    publish(SimpleNamespace(sampling_backend="pytorch"))
    return Sampler._sample_from_probs.__get__(SimpleNamespace(), Sampler)


@pytest.fixture
def chooser(sampler: object) -> TargetChooser:
    """A chooser over that sampler."""
    return TargetChooser(SimpleNamespace(_sample_from_probs=sampler, use_nan_detection=False), ONE_RANK)


class TwoRanks:
    """A group whose first rank drew token 3 for every node."""

    world_size = 2

    def broadcast(self, tokens: torch.Tensor, src: int) -> torch.Tensor:
        """Rank 0's samples."""
        assert src == 0
        return torch.full_like(tokens, 3)


def test_samples_come_from_the_first_rank(sampler: object) -> None:
    """Tensor-parallel ranks must not draw for themselves."""
    chooser = TargetChooser(SimpleNamespace(_sample_from_probs=sampler, use_nan_detection=False), TwoRanks())
    tokens = chooser.choose(torch.randn(6, 9), sampling(2), torch.zeros(6, dtype=torch.int64), 3)
    assert tokens.tolist() == [[3, 3, 3], [3, 3, 3]]


@seeded
def test_chunks_do_not_change_seeded_samples(chooser: TargetChooser, monkeypatch: pytest.MonkeyPatch) -> None:
    """Probabilities are held for a few rows at a time; each row keeps its own parameters, seed and position."""
    torch.manual_seed(3)
    logits, positions = torch.randn(12, 40), torch.arange(12)
    info = sampling(
        3,
        temperatures=torch.tensor([[0.5], [1.0], [2.0]]),
        sampling_seed=torch.tensor([1, 2, 3]),
    )
    whole = chooser.choose(logits, info, positions, 4)
    monkeypatch.setattr(targets, "_PROBS_BYTES", 5 * 40 * 4)
    assert torch.equal(chooser.choose(logits, info, positions, 4), whole)


def test_nan_logits_are_ignored_where_sglang_looks_for_them(sampler: object) -> None:
    """With --enable-nan-detection a NaN never wins; without it (as of 0.5.13) it is argmax's business."""
    logits = torch.tensor([[float("nan"), 1.0, 2.0]])
    chooser = TargetChooser(SimpleNamespace(_sample_from_probs=sampler, use_nan_detection=True), ONE_RANK)
    expected = 2 if replaces_nan(SimpleNamespace(use_nan_detection=True)) else 0
    assert chooser.choose(logits, None, torch.zeros(1), 1).tolist() == [[expected]]


def test_root_only_requests_emit_one_token() -> None:
    """A penalised request takes the target's token at the root, whatever its tree holds."""
    tree = build_tree(torch.tensor([9, 9]), torch.zeros(2, 2, 1), torch.tensor([[[1], [2]]] * 2), 2)
    acceptance = accept_paths(tree, torch.tensor([[1, 2, 5]] * 2), torch.tensor([True, False]))
    assert acceptance.accept_lens.tolist() == [0, 2]
    assert acceptance.bonus.tolist() == [1, 5]


COVERAGE = {"all": [0, 1, 2, 3], "some": [1, 3], "none": [4]}


@pytest.mark.parametrize("covered", COVERAGE)
@pytest.mark.parametrize("top_k", [None, 3])
def test_sampled_tokens_have_the_targets_distribution(chooser: TargetChooser, covered: str, top_k: int | None) -> None:
    """First and second emitted tokens fit direct sampling (chi-square), whatever part of the support the tree covers.

    Accepting with min(1, p/q) on top-k children fails here (hipfire#483).
    """
    torch.manual_seed(11)
    batch, children = 40_000, COVERAGE[covered]
    ids = torch.tensor([children, children]).expand(batch, 2, -1)
    log_probs = torch.log_softmax(torch.linspace(1, 0, len(children)), -1).expand(batch, 2, -1)
    budget = len(children) * (1 + len(children))
    tree = build_tree(torch.full((batch,), 9), log_probs.contiguous(), ids, budget)
    width = budget + 1

    logits = torch.tensor([0.3, 1.2, -0.5, 0.9, -float("inf")])
    second = torch.tensor([1.0, -1.0, 0.2, 0.4, -float("inf")])
    by_depth = torch.where(tree.depths.unsqueeze(2) == 0, logits, second).reshape(batch * width, 5)
    info = sampling(batch)
    if top_k:
        info = sampling(batch, top_ks=torch.full((batch,), top_k, dtype=torch.int32), need_top_k_sampling=True)
    targets = chooser.choose(by_depth, info, torch.zeros(batch * width, dtype=torch.int64), width)
    acceptance = accept_paths(tree, targets)

    path_tokens = tree.tokens.gather(1, acceptance.path.clamp(min=0))
    first = torch.where(acceptance.accept_lens > 0, path_tokens[:, 1], acceptance.bonus)
    assert_fits(first, logits, top_k)
    deeper = acceptance.accept_lens >= 1
    assert bool(deeper.any()) == (covered != "none")
    if covered != "none":
        next_token = torch.where(acceptance.accept_lens > 1, path_tokens[:, 2], acceptance.bonus)[deeper]
        assert_fits(next_token, second, top_k)


def assert_fits(samples: torch.Tensor, logits: torch.Tensor, top_k: int | None) -> None:
    """Chi-square against softmax of the top-k logits, at a level that a biased rule cannot pass."""
    kept = logits if top_k is None else torch.where(logits >= logits.topk(top_k).values[-1], logits, -float("inf"))
    expected = torch.softmax(kept.double(), -1)
    counts = torch.bincount(samples, minlength=5).double()
    assert counts[expected == 0].sum() == 0
    support = expected > 0
    result = stats.chisquare(counts[support].numpy(), (expected[support] * len(samples)).numpy())
    assert result.pvalue > 1e-4, (counts.tolist(), expected.tolist())


def test_greedy_and_sampled_requests_mix(chooser: TargetChooser) -> None:
    """A temperature-0 request in a sampling batch stays an argmax (SGLang marks it with top-k 1)."""
    torch.manual_seed(0)
    logits = torch.randn(2 * 300, 50)
    info = sampling(2, top_ks=torch.tensor([1, 1 << 30], dtype=torch.int32), need_top_k_sampling=True)
    targets = chooser.choose(logits, info, torch.zeros(600, dtype=torch.int64), 300)
    greedy = logits.argmax(-1).view(2, 300)
    assert torch.equal(targets[0], greedy[0])
    assert not torch.equal(targets[1], greedy[1])


def test_temperature_is_each_requests_own(chooser: TargetChooser) -> None:
    """At a temperature of 0.01 a gap of one logit decides; at 1 a third of the samples go to the other token."""
    torch.manual_seed(0)
    logits = torch.tensor([1.0, 0.0]).repeat(2 * 500, 1)
    info = sampling(2, temperatures=torch.tensor([[0.01], [1.0]]))
    others = chooser.choose(logits, info, torch.zeros(1000, dtype=torch.int64), 500).sum(dim=1).tolist()
    assert others[0] == 0
    assert 80 < others[1] < 190


@seeded
def test_seeded_sampling_depends_on_position_alone(chooser: TargetChooser) -> None:
    """Same seed, position and logits give the same token in any node, so a seeded text is that of plain decoding."""
    logits = torch.randn(1, 64).expand(6, 64)
    info = sampling(1, sampling_seed=torch.tensor([42]))
    positions = torch.tensor([10, 11, 10, 12, 11, 10])
    tokens = chooser.choose(logits, info, positions, 6)[0]
    assert tokens[0] == tokens[2] == tokens[5]
    assert tokens[1] == tokens[4]
