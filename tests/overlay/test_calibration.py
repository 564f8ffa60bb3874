# SPDX-License-Identifier: Apache-2.0
"""The fit of the exponents: what it finds, what it forgets, and that it costs nothing where it finds nothing."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.speculative.ddtree.calibration import AHEAD, EXPONENTS, FITTED, update_by_tensors
from sglang.srt.speculative.ddtree.calibration_args import HIGHEST, LOWEST
from tests.overlay.calibration_steps import HEAD, POSITIONS, VOCABULARY, Workload, fitted, random_step


def test_fit_finds_the_exponents_that_the_target_draws_with() -> None:
    """With a target that draws from softmax(truth * logits) the exponents become the truth, position by position."""
    truth = [1.6, 1.3, 0.7, 2.0, 1.0]
    calibration, workload = fitted(), Workload(scale=2.0)

    for _ in range(150):
        workload.step(calibration, truth, batch=32, budget=32)

    report = calibration.report()
    found = torch.tensor(report["exponents"])
    seen = torch.tensor(report["labels"])
    assert seen[0] == 150 * 32
    # The last positions are reached seldom; the prior weighs more there.
    assert (found - torch.tensor(truth)).abs()[:3].max() < 0.12, report
    assert found[3] > 1.3, report
    assert all(gain > 0 for gain in report["gain"][:2]), report


def test_one_label_moves_little_and_many_move_far() -> None:
    """The prior holds the exponents at 1 until there is evidence."""
    calibration, workload = fitted(), Workload()

    workload.step(calibration, 3.0, batch=1)
    first = calibration.report()["exponents"][0]
    for _ in range(60):
        workload.step(calibration, 3.0, batch=16)

    assert abs(first - 1.0) < 0.3
    assert calibration.report()["exponents"][0] > 1.8


def test_positions_without_labels_take_the_common_exponent() -> None:
    """A position that is never reached is scored as its neighbours are, held back to 1."""
    calibration = fitted()
    choices, tokens, _, _ = random_step(16, POSITIONS, 8)
    best = choices.token_ids.view(16, POSITIONS, 8)[..., 0]
    tokens = torch.nn.functional.pad(best, (0, 1))

    for _ in range(40):
        update_by_tensors(calibration.state, choices, tokens, torch.zeros(16, dtype=torch.int64))

    found = calibration.report()["fitted"]
    assert calibration.report()["labels"] == [640.0, 0.0, 0.0, 0.0, 0.0]
    assert found[0] > found[1] == found[4] > 1.0


@pytest.mark.parametrize("truth", [12.0, 0.0])
def test_exponents_stay_between_their_bounds(truth: float) -> None:
    """A target that always takes the first choice, or any at all, does not push them out of bounds."""
    calibration, workload = fitted(), Workload(scale=1.0)

    for _ in range(60):
        workload.step(calibration, truth, batch=48)
        exponents = calibration.state[EXPONENTS]
        assert exponents.min() >= LOWEST
        assert exponents.max() <= HIGHEST
    assert calibration.state[FITTED, 0].item() in (LOWEST, HIGHEST)


def test_exponents_leave_a_bound_as_soon_as_labels_speak_against_it() -> None:
    """What would have gone beyond a bound is not saved up: no windup."""
    calibration, workload = fitted(), Workload(scale=1.0)

    for _ in range(60):
        workload.step(calibration, 12.0, batch=48)
    at_bound = calibration.state[EXPONENTS, 0].item()
    for _ in range(8):
        workload.step(calibration, 1.0, batch=16)

    assert at_bound == HIGHEST
    assert calibration.state[FITTED, 0] < 2.6
    assert calibration.state[EXPONENTS, 0] < 2.0


def test_accepts_more_than_uncalibrated_trees_where_the_drafter_understates() -> None:
    """The same drafts and targets, scored with the fit and with 1."""
    calibration, workload = fitted(), Workload(seed=1, scale=1.0)

    counts = torch.tensor([workload.step(calibration, 3.0) for _ in range(150)])[30:].sum(dim=0)

    assert counts[0] > 1.03 * counts[1], counts


@pytest.mark.parametrize("period", [1, 7, 60])
def test_workload_that_changes_does_not_hold_it_below_uncalibrated_trees(period: int) -> None:
    """The targets turn round every `period` steps: the drafter is far too shy, then far too sure."""
    calibration, workload = fitted(), Workload(seed=2, scale=2.0)

    counts = torch.tensor([workload.step(calibration, 3.0 if i // period % 2 == 0 else 0.4) for i in range(360)])

    mine, other = counts.sum(dim=0).tolist()
    assert mine >= 0.985 * other, (mine, other)


def test_one_abrupt_change_is_followed_within_a_few_steps() -> None:
    """After many steps of one kind the other kind is accepted as if nothing had been learned, soon."""
    calibration, workload = fitted(), Workload(seed=3, scale=2.0)
    for _ in range(150):
        workload.step(calibration, 3.0, batch=16)
    before = calibration.report()["exponents"][0]

    counts = torch.tensor([workload.step(calibration, 0.4) for _ in range(120)])

    assert before > 2.0
    assert calibration.report()["exponents"][0] < 1.0
    assert counts[:20, 0].sum() >= 0.8 * counts[:20, 1].sum()
    assert counts[20:, 0].sum() >= 0.97 * counts[20:, 1].sum()


def test_labels_chosen_against_the_fit_cannot_hold_it_below_uncalibrated_trees() -> None:
    """An adversary sees the exponents and answers the other way: wild when they are high, first choice when low."""
    calibration, workload = fitted(), Workload(seed=4, scale=2.0)

    counts = []
    for _ in range(360):
        exponent = calibration.state[EXPONENTS, 0].item()
        counts.append(workload.step(calibration, 0.3 if exponent > 1.05 else 4.0))

    mine, other = torch.tensor(counts).sum(dim=0).tolist()
    assert mine >= 0.97 * other, (mine, other)


def test_labels_that_are_never_drafted_leave_the_drafter_as_it_is() -> None:
    """A target whose tokens are in no tree (anti-correlated): the exponents may fall, nothing is lost by it."""
    calibration, workload = fitted(), Workload(seed=5, scale=2.0)

    counts = torch.tensor([workload.step(calibration, -2.0) for _ in range(200)])
    after = torch.tensor([workload.step(calibration, 1.0) for _ in range(100)])

    assert counts[:, 0].sum() >= counts[:, 1].sum()
    assert after[20:, 0].sum() >= 0.97 * after[20:, 1].sum()


def test_far_behind_falls_back_to_one() -> None:
    """Where recent labels speak against the exponents in use, 1 is used instead, and old labels fade faster."""
    calibration = fitted()
    calibration.state[FITTED] = calibration.state[EXPONENTS] = 2.5
    exponents = calibration.state[EXPONENTS].clone()
    choices = HEAD.top_log_probs(4 * torch.randn((16 * POSITIONS, VOCABULARY)), 8, exponents)
    worst = choices.token_ids.view(16, POSITIONS, 8)[..., 7]

    update_by_tensors(calibration.state, choices, torch.nn.functional.pad(worst, (0, 1)), torch.full((16,), POSITIONS))

    assert (calibration.state[AHEAD] < -3.9).all()
    assert torch.allclose(calibration.state[EXPONENTS], torch.ones(POSITIONS), atol=0.1)


def test_tiny_data_stays_near_one() -> None:
    """A handful of steps, whatever they say: nothing jumps."""
    for seed in range(20):
        calibration, workload = fitted(), Workload(seed=seed, scale=3.0)
        for _ in range(3):
            workload.step(calibration, 1.0, batch=1)
        assert (calibration.state[EXPONENTS] - 1).abs().max() < 0.35, seed
