# SPDX-License-Identifier: Apache-2.0
"""Top-k log-probabilities over whole and sharded vocabularies."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.speculative.ddtree.draft_head import Choices, DraftHead
from sglang.srt.speculative.ddtree.tree import Tree, build_tree


HIDDEN, ORG, ADDED, PADDING = 16, 1003, 3, 64


def padded(size: int) -> int:
    return -(-size // PADDING) * PADDING


class FakeRanks:
    """Tensor-parallel ranks run one after the other: a first pass records what each gathers, a second answers."""

    def __init__(self, size: int) -> None:
        self.world_size = size
        self.gathered: list[list[torch.Tensor]] = []

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """What all ranks gathered at this call of theirs."""
        self.gathered[-1].append(tensor)
        if len(self.gathered) <= self.world_size:
            return tensor
        call = len(self.gathered[-1]) - 1
        return torch.cat([calls[call] for calls in self.gathered[: self.world_size]], dim=dim)


def shard(weight: torch.Tensor, rank: int, ranks: int) -> SimpleNamespace:
    """Rank's part of a head [ORG + ADDED, HIDDEN], padded with rows that would win if they were read."""
    org_size, added_size = padded(ORG) // ranks, padded(ADDED) // ranks
    rows = torch.full((org_size + added_size, HIDDEN), 100.0)
    org = weight[:ORG][rank * org_size : (rank + 1) * org_size]
    added = weight[ORG:][rank * added_size : (rank + 1) * added_size]
    rows[: len(org)] = org
    rows[org_size : org_size + len(added)] = added
    indices = SimpleNamespace(
        num_org_elements=len(org),
        num_org_elements_padded=org_size,
        num_added_elements=len(added),
        org_vocab_start_index=rank * org_size,
        added_vocab_start_index=ORG + rank * added_size,
    )
    return SimpleNamespace(weight=rows, shard_indices=indices)


def whole(weight: torch.Tensor, hidden: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorted log-probabilities of the unsharded head."""
    log_probs = torch.log_softmax(hidden @ weight.T, dim=-1)
    values, ids = log_probs.sort(dim=-1, descending=True, stable=True)
    return values[:, :k], ids[:, :k]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("k", [1, 7, 64])
def test_sharded_head_equals_the_whole_one_on_every_rank(ranks: int, k: int) -> None:
    """Ids, order and globally normalised log-probabilities, with padding and added tokens (sglang#27509, #29907)."""
    torch.manual_seed(k)
    weight, hidden = torch.randn(ORG + ADDED, HIDDEN), torch.randn(9, HIDDEN).abs()
    weight[-1] = 3.0  # an added token that is among the best
    group = FakeRanks(ranks)
    heads = [DraftHead(shard(weight, rank, ranks), None, group) for rank in range(ranks)]
    for head in heads:
        group.gathered.append([])
        head.top_log_probs(hidden, k)
    values, ids = whole(weight, hidden, k)
    for head in heads:
        group.gathered.append([])
        choices = head.top_log_probs(hidden, k)
        assert torch.equal(choices.token_ids, ids)
        torch.testing.assert_close(choices.log_probs, values, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("exponents", "moments", "sums"), [(None, True, 1), (torch.ones(3), True, 3), (torch.ones(3), False, 1)]
)
def test_ranks_gather_no_more_than_is_read(exponents: torch.Tensor | None, moments: bool, sums: int) -> None:
    """k logits and ids a row and the partition sum; what a fit needs only where exponents are fitted."""
    group = FakeRanks(2)
    group.gathered.append([])
    head = DraftHead(shard(torch.randn(ORG + ADDED, HIDDEN), 0, 2), None, group)
    head.top_log_probs(torch.randn(6, HIDDEN), 7, exponents, moments=moments)
    assert [tuple(part.shape) for part in group.gathered[0]] == [(6, 2 * 7 + sums)]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("chain_seed", [False, True])
def test_ranks_build_the_tree_of_the_whole_vocabulary(ranks: int, chain_seed: bool) -> None:
    """Tokens, parents and order are those of the unsharded head on every rank, ties between shards included."""
    torch.manual_seed(ranks)
    weight, hidden = torch.randn(ORG + ADDED, HIDDEN), torch.randn(2 * 5, HIDDEN)
    weight[ORG // 2 :: 7] = weight[0]  # equal logits in every shard
    group = FakeRanks(ranks)
    heads = [DraftHead(shard(weight, rank, ranks), None, group) for rank in range(ranks)]
    for head in heads:
        group.gathered.append([])
        head.top_log_probs(hidden, 24)

    def tree_of(choices: Choices) -> Tree:
        shape = (2, 5, -1)
        values, ids = choices.log_probs, choices.token_ids
        return build_tree(torch.tensor([3, 4]), values.view(shape), ids.view(shape), 24, chain_seed=chain_seed)

    one = FakeRanks(1)
    expected = tree_of(DraftHead(shard(weight, 0, 1), None, one).top_log_probs(hidden, 24))
    for head in heads:
        group.gathered.append([])
        tree = tree_of(head.top_log_probs(hidden, 24))
        for name in ("tokens", "parents", "depths", "ranks"):
            assert torch.equal(getattr(tree, name), getattr(expected, name))


def test_ties_go_to_the_lower_token_id() -> None:
    """Equal logits keep token order, so every rank and every run builds one tree."""
    head = DraftHead(shard(torch.ones(ORG + ADDED, HIDDEN), 0, 1), None, FakeRanks(1))
    assert head.top_log_probs(torch.ones(2, HIDDEN), 6).token_ids.tolist() == [[0, 1, 2, 3, 4, 5]] * 2


def test_soft_cap_and_scale_of_the_target_apply() -> None:
    """They leave the argmax alone and change the probabilities a tree is built from (vllm_ddtree 931f661db)."""
    weight, hidden = torch.randn(ORG + ADDED, HIDDEN), torch.randn(4, HIDDEN)
    processor = SimpleNamespace(logit_scale=0.5, final_logit_softcapping=3.0)
    values = DraftHead(shard(weight, 0, 1), processor, FakeRanks(1)).top_log_probs(hidden, 5).log_probs
    capped = 3.0 * torch.tanh(0.5 * (hidden @ weight.T) / 3.0)
    torch.testing.assert_close(values, torch.log_softmax(capped, -1).sort(-1, descending=True).values[:, :5])


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_head_is_refused(dtype: torch.dtype) -> None:
    """Such weights give no logits without their scales; the message names the way out."""
    head = SimpleNamespace(weight=torch.zeros(4, 4).to(dtype), shard_indices=None)
    with pytest.raises(ValueError, match="not quantised"):
        DraftHead(head, None, FakeRanks(1))


@pytest.mark.parametrize("head", [None, SimpleNamespace(weight=torch.zeros(4, 4))])
def test_head_of_another_kind_is_refused(head: object) -> None:
    """A model without a vocabulary-parallel head ends the start, not the first request."""
    with pytest.raises(ValueError, match="vocabulary-parallel"):
        DraftHead(head, None, FakeRanks(1))


def test_replaced_weight_is_used() -> None:
    """A weight update may put another tensor into the head."""
    head = shard(torch.randn(ORG + ADDED, HIDDEN), 0, 1)
    draft_head = DraftHead(head, None, FakeRanks(1))
    weight, hidden = torch.randn(ORG + ADDED, HIDDEN), torch.randn(2, HIDDEN)
    head.weight = shard(weight, 0, 1).weight
    assert torch.equal(draft_head.top_log_probs(hidden, 3).token_ids, whole(weight, hidden, 3)[1])


@pytest.mark.parametrize("ranks", [1, 4])
def test_without_moments_the_choices_are_the_same(ranks: int) -> None:
    """Bit by bit, so that given exponents build the trees that fitted ones of the same values would."""
    torch.manual_seed(1)
    weight, hidden = torch.randn(ORG + ADDED, HIDDEN), torch.randn(2 * 3, HIDDEN)
    exponents = torch.tensor([0.5, 1.0, 2.0])
    found = {}
    for moments in (True, False):
        group = FakeRanks(ranks)
        heads = [DraftHead(shard(weight, rank, ranks), None, group) for rank in range(ranks)]
        for _ in range(2):
            for head in heads:
                group.gathered.append([])
                found[moments] = head.top_log_probs(hidden, 7, exponents, moments=moments)

    assert torch.equal(found[False].log_probs, found[True].log_probs)
    assert torch.equal(found[False].token_ids, found[True].token_ids)
    assert found[False].logits is found[False].mean is found[False].plain_log_z is None


@pytest.mark.parametrize("ranks", [1, 4])
def test_exponents_change_the_probabilities_and_say_what_a_fit_needs(ranks: int) -> None:
    """Log-softmax of exponent * logit by position; mean of the logit, and the plain partition sum."""
    torch.manual_seed(0)
    weight, hidden = torch.randn(ORG + ADDED, HIDDEN), torch.randn(2 * 3, HIDDEN)
    exponents = torch.tensor([0.5, 1.0, 2.0])
    processor = SimpleNamespace(logit_scale=0.5, final_logit_softcapping=3.0)
    group = FakeRanks(ranks)
    heads = [DraftHead(shard(weight, rank, ranks), processor, group) for rank in range(ranks)]
    for _ in range(2):
        answers = []
        for head in heads:
            group.gathered.append([])
            answers.append(head.top_log_probs(hidden, 7, exponents))
    logits = (3.0 * torch.tanh(0.5 * (hidden.double() @ weight.double().T) / 3.0)).view(2, 3, -1)
    weights = torch.softmax(exponents.view(1, 3, 1) * logits, dim=-1)
    expected = {
        "log_probs": weights.log().sort(dim=-1, descending=True).values[..., :7],
        "logits": logits.sort(dim=-1, descending=True).values[..., :7],
        "mean": (weights * logits).sum(dim=-1),
        "plain_log_z": torch.logsumexp(logits, dim=-1),
    }
    for choices in answers:
        for name, values in expected.items():
            torch.testing.assert_close(getattr(choices, name), values.flatten(0, 1).float(), atol=1e-5, rtol=1e-5)
        assert torch.equal(choices.token_ids, logits.sort(dim=-1, descending=True).indices.flatten(0, 1)[:, :7])
