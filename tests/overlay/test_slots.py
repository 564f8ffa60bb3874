# SPDX-License-Identifier: Apache-2.0
"""Slots of a step: kernels beside their tensor forms, and the slots of what is committed."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.speculative.ddtree import captured_head
from sglang.srt.speculative.ddtree.accept import accept
from sglang.srt.speculative.ddtree.captured_head import CapturedHead
from sglang.srt.speculative.ddtree.draft_head import Choices
from sglang.srt.speculative.ddtree.draft_slots import draft_slots
from sglang.srt.speculative.ddtree.placing import place_by_request
from sglang.srt.speculative.ddtree.placing_kernel import place_slots
from sglang.srt.speculative.ddtree.slots import slots_by_index
from sglang.srt.speculative.ddtree.slots_kernel import read_draft_slots, read_slots
from sglang.srt.speculative.ddtree.staging_kernel import stage
from sglang.srt.speculative.ddtree.tree import build_tree, ordered_topk


BLOCK = 5


@pytest.mark.parametrize("width", [1, 2, 9, 16])
def test_slots_are_those_of_the_next_positions(width: int) -> None:
    """Of rows in any order, up to the last column."""
    table = torch.randperm(7 * 40, generator=torch.Generator().manual_seed(1)).view(7, 40).to(torch.int32)
    rows, lens = torch.tensor([6, 0, 3]), torch.tensor([0, 40 - width, 11])
    slots = read_slots(table, rows, lens, width)
    assert torch.equal(slots, slots_by_index(table, rows, lens, width))
    assert slots[1].tolist() == table[0, 40 - width :].tolist()


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("budget", [2, 11])
def test_draft_slots_follow_the_committed_path(budget: int, moved: bool) -> None:
    """Nodes where they lie, or the first slots if their KV has moved there; slot 0 behind the path."""
    torch.manual_seed(budget)
    values, ids = ordered_topk(torch.log_softmax(torch.randn(4, BLOCK - 1, 6), -1), 4)
    tree = build_tree(torch.tensor([1, 2, 3, 4]), values, ids, budget)
    targets = torch.randint(0, 6, tree.tokens.shape)
    targets[0] = 99
    targets[1, 0] = tree.tokens[1, 1]
    acceptance = accept(tree, targets, prefix_lens=torch.zeros(4, dtype=torch.int64), block_size=BLOCK)
    assert acceptance.accept_lens.unique().numel() > 1
    slots = torch.randperm(200)[: 4 * tree.width].view(4, -1) + 1
    found = draft_slots(slots, acceptance, moved=moved)
    assert torch.equal(found, read_draft_slots(slots, acceptance.path, acceptance.commit_lens, BLOCK, moved))
    for request, count in enumerate(acceptance.commit_lens.tolist()):
        nodes = range(count) if moved else acceptance.path[request, :count].tolist()
        wanted = [int(slots[request, node]) for node in nodes]
        assert found.view(4, BLOCK)[request].tolist() == wanted + [0] * (BLOCK - count)


class Head:
    """Choices that tell which call made them."""

    calls = 0

    def top_log_probs(self, rows: torch.Tensor, k: int, exponents: torch.Tensor | None, *, moments: bool) -> Choices:
        assert exponents is None
        assert moments
        self.calls += 1
        return Choices(rows[:, :k] + self.calls, torch.zeros(len(rows), k, dtype=torch.int64))


def test_captured_choices_are_found_by_the_hidden_states_of_their_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller batch reads the first rows of a larger graph; hidden states of a warm-up are unknown."""
    head = CapturedHead(Head(), block_size=BLOCK, topk=2)
    warm, larger, small, large, cold = (torch.randn(count * BLOCK, 8) for count in (2, 4, 2, 4, 3))
    monkeypatch.setattr(captured_head.torch.cuda, "is_current_stream_capturing", lambda: False)
    head(warm)
    head(larger)
    left = {id(kept.log_probs) for kept in head._kept.values()}
    monkeypatch.setattr(captured_head.torch.cuda, "is_current_stream_capturing", lambda: True)
    head(small)
    head(large)
    head(cold)
    assert head.choices_of(warm) is None
    assert head.choices_of(cold) is None
    # Nothing of a graph's own memory: a later replay writes there.
    assert {id(kept.log_probs) for kept in head._captured.values()} == left
    choices = head.choices_of(large[: 3 * BLOCK])
    assert choices is not None
    assert choices.log_probs.shape == (3 * (BLOCK - 1), 2)
    rows = large[: 3 * BLOCK].view(3, BLOCK, 8)[:, 1:].reshape(-1, 8)
    assert torch.equal(choices.log_probs, rows[:, :2] + 4)
    assert choices.logits is None


@pytest.mark.parametrize("padded", [2, 3, 6])
def test_a_graph_finds_committed_rows_and_no_token_in_its_padding(padded: int) -> None:
    """Rows of a batch of two in front; lengths of what is behind it are 0, whatever a larger batch left there."""
    hidden, rows = torch.randn(20, 37), torch.randint(0, 20, (2, BLOCK))
    staged, lens = torch.full((padded * BLOCK, 37), 7.0), torch.full((padded,), 3, dtype=torch.int32)
    stage(hidden, rows, torch.tensor([4, 1], dtype=torch.int32), staged, lens)
    assert torch.equal(staged[: 2 * BLOCK], hidden[rows.flatten()])
    assert (staged[2 * BLOCK :] == 7).all()
    assert lens.tolist() == [4, 1] + [0] * (padded - 2)


@pytest.mark.parametrize("budget", [1, 2, 11])
def test_slots_are_sorted_by_a_kernel_as_request_by_request(budget: int) -> None:
    """Kept ones in path order, free ones, the table and the lengths; nothing behind a path is mapped."""
    torch.manual_seed(budget)
    values, ids = ordered_topk(torch.log_softmax(torch.randn(5, BLOCK - 1, 6), -1), 4)
    tree = build_tree(torch.arange(5), values, ids, budget)
    targets = torch.randint(0, 6, tree.tokens.shape)
    targets[0] = 99
    targets[1, 0] = tree.tokens[1, 1]
    lens = torch.tensor([0, 7, 3, 12, 1])
    acceptance = accept(tree, targets, prefix_lens=lens, block_size=BLOCK)
    assert acceptance.accept_lens.unique().numel() > 1
    slots, rows = torch.randperm(200)[: 5 * tree.width].view(5, -1) + 1, torch.tensor([4, 0, 6, 2, 5])
    results = []
    for place in (place_by_request, place_slots):
        table, before = torch.zeros(7, 30, dtype=torch.int32), lens.clone()
        placed = place(slots, acceptance, table, rows, before)
        count = int(acceptance.commit_lens.sum())
        results.append((placed.kept[:count], placed.free[: slots.numel() - count], placed.new_lens, table, before))
    for mine, other in zip(*results, strict=True):
        assert torch.equal(mine, other)
    kept, free, new_lens, table, after = results[1]
    assert sorted([*kept.tolist(), *free.tolist()]) == sorted(slots.flatten().tolist())
    assert new_lens.tolist() == after.tolist() == acceptance.new_seq_lens.tolist()
    assert (table != 0).sum() == len(kept)
