# SPDX-License-Identifier: Apache-2.0
"""The fit of the exponents: what it finds, what it forgets, and that the kernel does what the tensors say."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from prometheus_client import REGISTRY
from sglang.srt.server_args import set_global_server_args_for_scheduler
from sglang.srt.speculative.ddtree import calibration_report
from sglang.srt.speculative.ddtree.accept import accept
from sglang.srt.speculative.ddtree.calibration import (
    AHEAD,
    EVENTS,
    EXPONENTS,
    FITTED,
    LABELS,
    STATE_ROWS,
    Calibration,
    update_by_tensors,
)
from sglang.srt.speculative.ddtree.calibration_args import AUTO, HIGHEST, LOWEST, calibration_values, check_calibration
from sglang.srt.speculative.ddtree.calibration_kernel import update
from sglang.srt.speculative.ddtree.calibration_report import tell_of
from sglang.srt.speculative.ddtree.draft_head import Choices, DraftHead
from sglang.srt.speculative.ddtree.report import server_state
from sglang.srt.speculative.ddtree.tree import build_tree


VOCABULARY, POSITIONS = 40, 5

torch.set_num_threads(1)  # small tensors: threads would wait for each other


def head_of(weight: torch.Tensor) -> DraftHead:
    """A head over logits that are the hidden states."""
    rows = len(weight)
    shard = SimpleNamespace(
        num_org_elements=rows, num_org_elements_padded=rows, num_added_elements=0,
        org_vocab_start_index=0, added_vocab_start_index=rows,
    )  # fmt: skip
    return DraftHead(SimpleNamespace(weight=weight, shard_indices=shard), None, SimpleNamespace(world_size=1))


HEAD = head_of(torch.eye(VOCABULARY))


class Workload:
    """Drafters whose logits are known, and targets that draw from softmax(truth * logits)."""

    def __init__(self, seed: int = 0, scale: float = 3.0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.scale = scale

    def step(
        self, calibration: Calibration, truth: list[float] | float, batch: int = 8, budget: int = 8
    ) -> tuple[int, int]:
        """Serve a step of `batch` requests: tokens accepted with the exponents in use, and with exponents 1."""
        logits = self.scale * torch.randn((batch, POSITIONS, VOCABULARY), generator=self.generator)
        exponents = torch.as_tensor(truth, dtype=torch.float32).expand(POSITIONS)
        shares = torch.softmax(exponents[:, None] * logits, dim=-1).view(-1, VOCABULARY)
        labels = torch.multinomial(shares, 1, generator=self.generator).view(batch, POSITIONS)
        rows, ones = logits.view(-1, VOCABULARY), torch.ones(POSITIONS)
        choices = HEAD.top_log_probs(rows, budget, calibration.exponents)
        mine = self._accept(choices, labels, budget)
        calibration.observe(choices, mine)
        other = self._accept(HEAD.top_log_probs(rows, budget, ones), labels, budget)
        return int(mine.accept_lens.sum()), int(other.accept_lens.sum())

    def _accept(self, choices: Choices, labels: torch.Tensor, budget: int):
        batch = len(labels)
        shape = (batch, POSITIONS, -1)
        tree = build_tree(
            torch.zeros(batch, dtype=torch.int64), choices.log_probs.view(shape), choices.token_ids.view(shape), budget
        )
        after = torch.nn.functional.pad(labels, (0, 1)).gather(1, tree.depths)
        return accept(tree, after, prefix_lens=torch.zeros(batch, dtype=torch.int64), block_size=POSITIONS + 1)


def fitted(positions: int = POSITIONS) -> Calibration:
    return Calibration(AUTO, positions, "cpu")


def random_step(
    batch: int, positions: int, k: int, *, seed: int = 0, vocabulary: int = VOCABULARY
) -> tuple[Choices, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choices at exponents that are not 1, emitted tokens, accept lengths and judged requests."""
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn((batch * positions, vocabulary), generator=generator)
    exponents = 0.6 + torch.rand(positions, generator=generator)
    choices = head_of(torch.eye(vocabulary)).top_log_probs(logits, k, exponents)
    ranks = torch.randint(0, k, (batch, positions, 1), generator=generator)
    tokens = choices.token_ids.view(batch, positions, k).gather(2, ranks).squeeze(2)
    wild = torch.rand((batch, positions), generator=generator) < 0.2
    tokens = torch.where(wild, torch.randint(0, vocabulary, tokens.shape, generator=generator), tokens)
    tokens = torch.nn.functional.pad(tokens, (0, 1))
    accept_lens = torch.randint(0, positions + 1, (batch,), generator=generator)
    return choices, tokens, accept_lens, torch.rand(batch, generator=generator) < 0.3


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


def test_reset_forgets_labels_and_keeps_what_was_given() -> None:
    """New weights, new fit; fixed exponents are the user's."""
    calibration, given = fitted(), Calibration.of("1.5", POSITIONS, "cpu")
    for _ in range(20):
        Workload().step(calibration, 3.0)
    assert calibration.report()["exponents"][0] > 1.1
    exponents = calibration.exponents

    calibration.reset()
    given.reset()

    assert calibration.report() == fitted().report()
    assert calibration.exponents is not None
    assert calibration.exponents.data_ptr() == exponents.data_ptr(), "a captured graph reads the old tensor"
    assert given.report()["exponents"] == [1.5] * POSITIONS


def test_off_and_fixed_exponents_ignore_labels() -> None:
    """`off` gives the head none; values stay as they are."""
    off, given = Calibration.of("off", POSITIONS, "cpu"), Calibration.of("1.2,1,1,1,0.9", POSITIONS, "cpu")
    for _ in range(20):
        Workload().step(given, 3.0)
    choices, _, _, _ = random_step(1, POSITIONS, 4)

    off.observe(replace(choices, logits=None, mean=None, variance=None, plain_log_z=None), None)

    assert off.exponents is None
    assert given.exponents.tolist() == pytest.approx([1.2, 1, 1, 1, 0.9])
    assert off.state.shape == (STATE_ROWS, POSITIONS)


def test_tiny_data_stays_near_one() -> None:
    """A handful of steps, whatever they say: nothing jumps."""
    for seed in range(20):
        calibration, workload = fitted(), Workload(seed=seed, scale=3.0)
        for _ in range(3):
            workload.step(calibration, 1.0, batch=1)
        assert (calibration.state[EXPONENTS] - 1).abs().max() < 0.35, seed


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


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("auto", AUTO), (" AUTO ", AUTO), ("off", None), ("1.3", (1.3,) * 3), ("1,2, 0.5", (1.0, 2.0, 0.5))],
)
def test_flag_takes(text: str, wanted: object) -> None:
    """A word, one exponent for all positions, or one for each."""
    assert calibration_values(text, 3) == wanted


@pytest.mark.parametrize(
    ("text", "said"),
    [("on", "auto"), ("1,2", "3 draft positions"), ("0.1", "from 0.5 to 3"), ("nan", "from 0.5 to 3"), ("", "auto")],
)
def test_flag_refuses(text: str, said: str) -> None:
    """The refusal says what would be taken."""
    with pytest.raises(ValueError, match="speculative-ddtree-calibration") as refused:
        check_calibration(text, 4)
    assert said in str(refused.value)


class Records(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def test_operators_see_the_exponents() -> None:
    """A log line once they have moved, a gauge for each depth, and what `/server_info` says."""
    calibration, seen = fitted(), Records()
    arguments = SimpleNamespace(enable_metrics=True, served_model_name="tiny", extra_metric_labels=None)
    set_global_server_args_for_scheduler(arguments)
    tell_of(calibration, 0)
    calibration.state[EXPONENTS] = torch.tensor([1.5, 1.25, 1, 1, 1])
    calibration.state[LABELS] = 300.0
    logging.getLogger(calibration_report.__name__).addHandler(seen)
    logging.getLogger(calibration_report.__name__).setLevel(logging.INFO)

    for _ in range(1200):
        calibration.told()

    assert len(seen.lines) == 1, "the second look finds nothing new"
    assert "exponents 1.50 1.25 1.00 1.00 1.00 after 300 labels" in seen.lines[0]
    labels = {"model_name": "tiny", "engine_type": "unified", "tp_rank": "0", "pp_rank": "0"}
    values = [REGISTRY.get_sample_value("sglang:ddtree_exponent", {**labels, "depth": str(d)}) for d in (1, 2, 5)]
    assert values == [1.5, 1.25, 1.0]
    assert server_state()["ddtree_calibration"]["exponents"] == [1.5, 1.25, 1.0, 1.0, 1.0]
