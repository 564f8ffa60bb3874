# SPDX-License-Identifier: Apache-2.0
"""What a step tells the fit of the exponents, by tensors and by the kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sglang.srt.speculative.ddtree.calibration import EVENTS, LABELS, update_by_tensors
from sglang.srt.speculative.ddtree.calibration_kernel import update
from tests.overlay.calibration_steps import POSITIONS, fitted, random_step


def test_only_depths_that_were_reached_are_labels() -> None:
    """n accepted drafts judge n + 1 positions; a request whose drafts were not judged judges none."""
    calibration = fitted()
    choices, tokens, _, _ = random_step(3, POSITIONS, 8)

    update_by_tensors(
        calibration.state,
        choices,
        tokens,
        torch.tensor([0, POSITIONS, 2]),
        torch.tensor([False, False, True]),
    )

    assert calibration.report()["labels"] == [2.0, 1.0, 1.0, 1.0, 1.0]


def test_rows_without_probabilities_say_nothing() -> None:
    """A NaN of the drafter must not stay in the fit for ever."""
    choices, tokens, _, _ = random_step(4, POSITIONS, 8)
    broken = choices.mean.clone()
    broken[::2] = float("nan")
    log_probs = choices.log_probs.clone()
    log_probs[::2] = float("nan")
    choices = replace(choices, mean=broken, log_probs=log_probs)
    for step in (update_by_tensors, update):
        calibration = fitted()

        step(calibration.state, choices, tokens, torch.full((4,), POSITIONS))

        assert calibration.state.isfinite().all()
        assert calibration.state[LABELS].sum() == 10


@pytest.mark.parametrize(
    ("batch", "positions", "k", "vocabulary"),
    [(1, 1, 1, 40), (3, 7, 4, 40), (17, 15, 40, 40), (33, 3, 17, 300), (5, 15, 64, 300)],
)
@pytest.mark.parametrize("judged", [True, False])
def test_kernel_agrees_with_the_tensors(batch: int, positions: int, k: int, vocabulary: int, judged: bool) -> None:
    """Several steps from one state, in float32 and in float64."""
    mine, other = fitted(positions).state, fitted(positions).state
    for seed in range(4):
        choices, tokens, accept_lens, root_only = random_step(batch, positions, k, seed=seed, vocabulary=vocabulary)
        only = root_only if judged else None

        update(mine, choices, tokens, accept_lens, only)
        update_by_tensors(other, choices, tokens, accept_lens, only)

        # Where the kept choices hold nearly everything, float32 knows the rest to two digits.
        torch.testing.assert_close(mine, other, rtol=1e-2, atol=2e-2)
        torch.testing.assert_close(mine[:2], other[:2], rtol=0, atol=1e-3)


def test_kernel_gives_the_same_bits_every_time() -> None:
    """Tensor-parallel ranks fit by themselves: equal labels, equal exponents."""
    choices, tokens, accept_lens, root_only = random_step(33, 15, 16, seed=1)
    states = [fitted(15).state for _ in range(2)]

    for state in states:
        update(state, choices, tokens, accept_lens, root_only)

    assert torch.equal(*states)


def test_padding_of_a_short_vocabulary_is_no_label() -> None:
    """Choices that no token fills have id 0: token 0 is not one of them."""
    choices, _, _, _ = random_step(2, POSITIONS, 8)
    logits, log_probs, token_ids = (part.clone() for part in (choices.logits, choices.log_probs, choices.token_ids))
    token_ids[:, :6] += 1
    logits[:, 6:] = log_probs[:, 6:] = float("-inf")
    token_ids[:, 6:] = 0
    choices = replace(choices, logits=logits, log_probs=log_probs, token_ids=token_ids)
    for step in (update_by_tensors, update):
        calibration = fitted()

        step(calibration.state, choices, torch.zeros((2, POSITIONS + 1), dtype=torch.int64), torch.tensor([5, 5]))

        assert calibration.state.isfinite().all()


def test_events_are_the_same_for_every_budget() -> None:
    """What a label says does not depend on how many choices a budget keeps, from `EVENTS` on."""
    many, tokens, accept_lens, _ = random_step(6, POSITIONS, EVENTS + 9, vocabulary=90)
    few = replace(
        many,
        logits=many.logits[:, :EVENTS].contiguous(),
        log_probs=many.log_probs[:, :EVENTS].contiguous(),
        token_ids=many.token_ids[:, :EVENTS].contiguous(),
    )
    states = [fitted().state for _ in range(2)]

    for state, choices in zip(states, (many, few), strict=True):
        update(state, choices, tokens, accept_lens)

    assert torch.equal(*states)
