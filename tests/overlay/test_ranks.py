# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel ranks as processes that talk over gloo: one tree and one text, whatever each would draw alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.layers.sampler import Sampler
from sglang.srt.speculative.ddtree import targets
from sglang.srt.speculative.ddtree.accept import accept
from sglang.srt.speculative.ddtree.calibration import FITTED, Calibration
from sglang.srt.speculative.ddtree.calibration_kernel import update
from sglang.srt.speculative.ddtree.draft_head import DraftHead
from sglang.srt.speculative.ddtree.targets import TargetChooser
from sglang.srt.speculative.ddtree.tree import build_tree
from tests.overlay.publishing import publish
from tests.overlay.rank_processes import answers_of


HIDDEN, VOCABULARY, BATCH, DEPTH, BUDGET = 16, 96, 3, 4, 12
TEMPERATURES = torch.tensor([[1.0], [0.8], [1.0]])
#: The last request is a greedy one.
TOP_KS = torch.tensor([1 << 30, 20, 1], dtype=torch.int32)


def step(rank: int, ranks: int, mode: str) -> dict[str, Any]:
    """One step of a rank: its share of the head, its own rounding of the hidden states, its own generator."""
    group = get_tp_group()
    torch.manual_seed(0)
    weight, hidden = torch.randn(VOCABULARY, HIDDEN), torch.randn(BATCH * DEPTH, HIDDEN)
    logits = 2 * torch.randn(BATCH * (BUDGET + 1), VOCABULARY)
    torch.manual_seed(100 + rank)
    hidden += 1e-6 * torch.randn_like(hidden)
    if mode == "ties":  # a kernel that rounds another way on one rank
        logits[:, 7] = logits[:, 5] = 50.0
        logits[:, 7] += 1e-3 * (rank % 2)
    rows = VOCABULARY // ranks
    indices = SimpleNamespace(
        num_org_elements=rows, num_org_elements_padded=rows, num_added_elements=0,
        org_vocab_start_index=rank * rows, added_vocab_start_index=0,
    )  # fmt: skip
    head = DraftHead(
        SimpleNamespace(weight=weight[rank * rows : (rank + 1) * rows], shard_indices=indices), None, group
    )
    calibration = Calibration.of("auto", DEPTH, "cpu")
    choices = head.top_log_probs(hidden, BUDGET, calibration.exponents)
    log_probs, ids = (part.view(BATCH, DEPTH, -1) for part in (choices.log_probs, choices.token_ids))
    tree = build_tree(torch.arange(BATCH), log_probs, ids, BUDGET)

    info = SimpleNamespace(
        is_all_greedy=mode != "drawn", temperatures=TEMPERATURES, top_ks=TOP_KS, top_ps=torch.ones(BATCH),
        min_ps=torch.zeros(BATCH), sampling_seed=None, need_top_k_sampling=True, need_top_p_sampling=False,
        need_min_p_sampling=False, max_top_k=None,
    )  # fmt: skip
    sampler = SimpleNamespace(use_nan_detection=False)
    sampler._sample_from_probs = Sampler._sample_from_probs.__get__(sampler, Sampler)
    positions, alone = torch.arange(len(logits)), SimpleNamespace(world_size=1)
    own = TargetChooser(sampler, alone).choose(logits, info, positions, BUDGET + 1)
    tokens = TargetChooser(sampler, group).choose(logits, info, positions, BUDGET + 1)
    accepted = accept(tree, tokens, prefix_lens=torch.zeros(BATCH, dtype=torch.int64), block_size=DEPTH + 1)
    update(calibration.state, choices, accepted.tokens, accepted.accept_lens)
    trees = [getattr(tree, name).tolist() for name in ("tokens", "parents", "ranks", "scores")]
    return {
        "own": own.tolist(), "tokens": tokens.tolist(), "trees": trees, "path": accepted.path.tolist(),
        "calibration": calibration.state.tolist(),
    }  # fmt: skip


def steps(rank: int, ranks: int) -> dict[str, Any]:
    """One rank's steps, with SGLang's own group."""
    publish(SimpleNamespace(sampling_backend="pytorch", enable_symm_mem=False))
    answers = {mode: step(rank, ranks, mode) for mode in ("drawn", "greedy")}
    targets.SYNC_TOKEN_IDS_ACROSS_TP = True
    answers["ties"] = step(rank, ranks, "ties")
    return answers


@pytest.fixture(scope="module", params=[2, 4])
def answers(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each rank says."""
    return answers_of(steps, request.param, seconds=120)


def test_ranks_build_one_tree(answers: list[dict[str, Any]]) -> None:
    """Tokens, links and scores to the last bit, though each rank's hidden states are rounded its own way."""
    for answer in answers:
        assert answer["drawn"]["trees"] == answers[0]["drawn"]["trees"]


def test_ranks_fit_the_same_exponents(answers: list[dict[str, Any]]) -> None:
    """To the last bit, without talking about them: the next step's trees depend on it."""
    for mode in ("drawn", "greedy"):
        first = answers[0][mode]["calibration"]
        assert any(exponent != 1.0 for exponent in first[FITTED])
        for answer in answers[1:]:
            assert answer[mode]["calibration"] == first


def test_ranks_take_the_first_ranks_draws(answers: list[dict[str, Any]]) -> None:
    """Their generators differ, and so do the tokens they would draw; what they accept does not."""
    first = answers[0]["drawn"]
    for answer in answers[1:]:
        assert answer["drawn"]["own"] != first["own"]
        assert answer["drawn"]["tokens"] == first["tokens"]
        assert answer["drawn"]["path"] == first["path"]
    assert first["own"][2] == first["tokens"][2]  # a greedy request among them


def test_greedy_ranks_agree_without_a_broadcast(answers: list[dict[str, Any]]) -> None:
    """Every rank holds the gathered logits and takes the same best token."""
    for answer in answers:
        assert answer["greedy"]["tokens"] == answer["greedy"]["own"] == answers[0]["greedy"]["tokens"]


def test_sglangs_variable_keeps_greedy_ranks_together(answers: list[dict[str, Any]]) -> None:
    """`SYNC_TOKEN_IDS_ACROSS_TP` is for kernels whose results differ between ranks; a tree's tokens obey it too."""
    first = answers[0]["ties"]
    assert answers[1]["ties"]["own"] != first["own"]
    for answer in answers:
        assert answer["ties"]["tokens"] == first["tokens"]
