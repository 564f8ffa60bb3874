# SPDX-License-Identifier: Apache-2.0
"""What one verified tree tells of every width, against verifying each of them."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.speculative.ddtree.accept import Acceptance, accept
from sglang.srt.speculative.ddtree.tally import columns, tally_by_tensors, tally_step
from sglang.srt.speculative.ddtree.tally_kernel import tally_by_kernel
from sglang.srt.speculative.ddtree.tree import Tree, build_tree


BATCH, DEPTH, CHOICES, BLOCK = 37, 7, 5, 8
WIDTHS = (2, 4, 8, 13, 33)
#: What the target says where nobody asked.
ELSEWHERE = 999


def drafts(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A drafter's choices, and a text for each request that follows them more or less."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn((BATCH, DEPTH, 50), generator=generator)
    log_probs, ids = logits.log_softmax(dim=2).topk(CHOICES, dim=2)
    ranks = torch.tensor([0, 0, 0, 0, 1, 2, 4])[torch.randint(0, 7, (BATCH, DEPTH), generator=generator)]
    text = ids.gather(2, ranks.unsqueeze(2)).squeeze(2)
    return log_probs, ids, text


def verify(tree: Tree, text: torch.Tensor, root_only: torch.Tensor | None = None) -> Acceptance:
    """Verify with a target that wants its text, and something else off the text."""
    targets = torch.full_like(tree.tokens, ELSEWHERE)
    for b in range(BATCH):
        on_text = {0: 0}
        for node in range(tree.width):
            if node in on_text or (
                int(tree.parents[b, node]) in on_text
                and int(tree.depths[b, node]) <= DEPTH
                and int(tree.tokens[b, node]) == int(text[b, int(tree.depths[b, node]) - 1])
            ):
                depth = int(tree.depths[b, node])
                on_text[node] = depth
                targets[b, node] = text[b, depth] if depth < DEPTH else ELSEWHERE
    return accept(tree, targets, prefix_lens=torch.full((BATCH,), 5), block_size=BLOCK, root_only=root_only)


def counted(width: int, grown: int, *, kernel: bool, seed: int = 0, seeded: bool = False) -> torch.Tensor:
    """The rows of one step."""
    log_probs, ids, text = drafts(seed)
    tree = build_tree(torch.zeros(BATCH, dtype=torch.int64), log_probs, ids, grown - 1, width=width, chain_seed=seeded)
    out = torch.full((BATCH, columns(len(WIDTHS))), -7.0)
    count = tally_by_kernel if kernel else tally_by_tensors
    count(out, torch.tensor(WIDTHS, dtype=torch.int32), tree, verify(tree, text), (log_probs, ids))
    return out


@pytest.mark.parametrize("kernel", [False, True], ids=["tensors", "kernel"])
@pytest.mark.parametrize("seeded", [False, True], ids=["best-first", "chain first"])
def test_every_narrower_width_is_counted_as_if_it_had_been_verified(kernel: bool, seeded: bool) -> None:
    """Its own tree, built for its own budget, accepted by the same target."""
    out = counted(33, 33, kernel=kernel, seeded=seeded)
    log_probs, ids, text = drafts(0)
    for column, width in enumerate(WIDTHS):
        alone = build_tree(torch.zeros(BATCH, dtype=torch.int64), log_probs, ids, width - 1, chain_seed=seeded)
        assert out[:, column].tolist() == verify(alone, text).accept_lens.tolist(), width
        expected = alone.scores[:, 1:].double().exp().sum(dim=1)
        torch.testing.assert_close(out[:, len(WIDTHS) + column].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", [False, True], ids=["tensors", "kernel"])
def test_the_chain_is_exact_within_the_tree_and_estimated_where_it_leaves_it(kernel: bool) -> None:
    """Where the tree held all of it, or the target left it, the count is the chain's; else the estimate of the rest."""
    log_probs, ids, text = drafts(0)
    chain = (ids[:, :, 0] == text).long().cumprod(dim=1).sum(dim=1).tolist()
    whole = counted(33, 33, kernel=kernel, seeded=True)[:, -1].tolist()
    assert whole == chain
    narrow = counted(4, 13, kernel=kernel)[:, -1].tolist()
    tree = build_tree(torch.zeros(BATCH, dtype=torch.int64), log_probs, ids, 3)
    estimated = 0
    for b in range(BATCH):
        held = int(((tree.ranks[b] == 0) & (tree.depths[b] > 0)).sum())
        on_chain = sum(
            1 for n in range(1, 4) if tree.ranks[b, n] == 0 and (tree.parents[b, n] == 0 or tree.parents[b, n] == n - 1)
        )
        if chain[b] < min(held, on_chain):
            assert narrow[b] == chain[b]
        elif narrow[b] != chain[b]:
            estimated += 1
            seen = int(verify(tree, text).accept_lens[b])
            rest = log_probs[b, seen + 1 :, 0].double().cumsum(0).exp().sum()
            assert narrow[b] == pytest.approx(seen + 1 + float(rest), rel=1e-5)
    assert estimated > 2


@pytest.mark.parametrize(("width", "grown"), [(2, 2), (2, 33), (8, 13), (13, 40)])
def test_the_kernel_counts_what_tensors_count(width: int, grown: int) -> None:
    """Trees that are grown further than they are verified, and not as far as the widest lane."""
    for seed in range(3):
        kernel, tensors = (counted(width, grown, kernel=k, seed=seed) for k in (True, False))
        torch.testing.assert_close(kernel, tensors, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernel", [False, True], ids=["tensors", "kernel"])
def test_a_request_that_may_emit_one_token_only_counts_none_for_any_width(kernel: bool) -> None:
    """Penalised requests: what their next token is says nothing about a chain that holds it."""
    log_probs, ids, text = drafts(1)
    tree = build_tree(torch.zeros(BATCH, dtype=torch.int64), log_probs, ids, 32, chain_seed=True)
    acceptance = verify(tree, text, root_only=torch.ones(BATCH, dtype=torch.bool))
    out = torch.empty((BATCH, columns(len(WIDTHS))))
    count = tally_by_kernel if kernel else tally_by_tensors
    count(out, torch.tensor(WIDTHS, dtype=torch.int32), tree, acceptance, (log_probs, ids))
    assert not out[:, : len(WIDTHS)].any()
    assert not out[:, -1].any()


def test_a_large_batch_is_counted_by_its_first_requests() -> None:
    """As many as there are rows; the rows behind a small batch stay as they were."""
    log_probs, ids, text = drafts(0)
    tree = build_tree(torch.zeros(BATCH, dtype=torch.int64), log_probs, ids, 32)
    acceptance, widths = verify(tree, text), torch.tensor(WIDTHS, dtype=torch.int32)
    few, many = torch.zeros((5, columns(5))), torch.full((BATCH + 2, columns(5)), -7.0)
    tally_step(few, widths, tree, acceptance, (log_probs, ids))
    tally_step(many, widths, tree, acceptance, (log_probs, ids))
    assert torch.equal(few, many[:5])
    assert (many[BATCH:] == -7.0).all()
