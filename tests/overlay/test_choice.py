# SPDX-License-Identifier: Apache-2.0
"""The choice of a width, against every fixed one: what it costs to find out, and what it costs to keep looking."""

from __future__ import annotations

from typing import Any

import pytest
from sglang.srt.speculative.ddtree.choice import Choice, Chooser
from tests.overlay.choosing_world import (
    BLOCK,
    BLUFF,
    BUCKETS,
    CHOICES,
    CODE,
    PROSE,
    Cost,
    Text,
    World,
    emitted,
    memory_bound,
    prior_of,
    staircase,
)


def world(cost: Cost, *, choices: tuple[Choice, ...] = CHOICES, prior: Any = None, **kwargs: Any) -> World:
    """A world whose chooser knows what start-up measured."""
    prior = prior_of(cost) if prior is None else prior
    return World(Chooser(choices, BUCKETS, chain_width=BLOCK, prior=prior), cost, **kwargs)


@pytest.mark.parametrize("batch_size", [1, 2, 4, 8, 16, 32, 48])
@pytest.mark.parametrize("text", [CODE, PROSE], ids=["code", "prose"])
@pytest.mark.parametrize("cost", [memory_bound, staircase])
def test_ten_seconds_are_within_three_percent_of_the_best_width(cost: Cost, text: Text, batch_size: int) -> None:
    """From the first step on, whatever finding out has cost included."""
    here = world(cost, noise=0.05)
    assert here.decode(text, batch_size, 10_000) >= 0.97 * here.best(text, batch_size)[0]


@pytest.mark.parametrize("batch_size", [1, 8, 48])
@pytest.mark.parametrize("cost", [memory_bound, staircase])
def test_half_a_second_is_enough_to_find_a_good_width(cost: Cost, batch_size: int) -> None:
    """After that, whatever is not being looked at is within three percent of the best."""
    here = world(cost, noise=0.05)
    here.decode(CODE, batch_size, 500)
    assert here.decode(CODE, batch_size, 2000) >= 0.97 * here.best(CODE, batch_size)[0]


@pytest.mark.parametrize("batch_size", [1, 16, 48])
@pytest.mark.parametrize("prior", [{}, prior_of(staircase, wrong=0.4)], ids=["none", "wrong"])
def test_a_start_up_measurement_that_says_nothing_or_nonsense_is_outlived(prior: Any, batch_size: int) -> None:
    """A few seconds of decoding replace it."""
    here = world(staircase, prior=prior, noise=0.05)
    here.decode(CODE, batch_size, 8000)
    assert here.decode(CODE, batch_size, 8000) >= 0.97 * here.best(CODE, batch_size)[0]


@pytest.mark.parametrize("batch_size", [1, 32])
def test_noisy_clocks_do_not_matter(batch_size: int) -> None:
    """Steps of 15 % spread, one in a hundred ten times too long, and a prefill before every other step."""
    here = world(staircase, noise=0.15, interrupted=0.5)
    assert here.decode(CODE, batch_size, 10_000) >= 0.96 * here.best(CODE, batch_size)[0]


@pytest.mark.parametrize("batch_size", [1, 8])
def test_a_first_measurement_that_was_disturbed_is_soon_forgotten(batch_size: int) -> None:
    """Every choice's first steps take half as long again as they will: a compiler, caches, a page that is missing."""
    here = world(memory_bound, noise=0.02, disturbed=1.5)
    here.decode(CODE, batch_size, 2500)
    assert here.decode(CODE, batch_size, 5000) >= 0.97 * here.best(CODE, batch_size)[0]


@pytest.mark.parametrize("batch_size", [4, 24])
def test_another_workload_is_noticed_within_a_second(batch_size: int) -> None:
    """Code, prose and code again, which want different widths."""
    here = world(staircase, noise=0.05)
    for text in (CODE, PROSE, CODE):
        here.decode(text, batch_size, 1000)
        assert here.decode(text, batch_size, 3000) >= 0.97 * here.best(text, batch_size)[0]


def test_batches_that_grow_and_shrink_find_their_width_again() -> None:
    """What was learned in a bucket is there when the batch comes back; a new bucket starts from the others."""
    here = world(staircase, noise=0.05)
    got, best = 0.0, 0.0
    for batch_size in (1, 8, 48, 32, 16, 2, 48, 1) * 2:
        got += here.decode(CODE, batch_size, 700)
        best += here.best(CODE, batch_size)[0]
    assert got >= 0.97 * best


def test_contexts_that_grow_are_followed() -> None:
    """Attention over a longer prefix slows every width, the wide ones most, and so moves the best one."""
    length = [0.0]

    def longer(batch_size: int, choice: Choice) -> float:
        return staircase(batch_size, choice) + length[0] * batch_size * (1.0 + choice.width / 16)

    here = world(longer, prior=prior_of(staircase), noise=0.05)
    got, best = 0.0, 0.0
    for _ in range(40):
        length[0] += 0.02
        got += here.decode(CODE, 8, 400)
        best += here.best(CODE, 8)[0]
    assert got >= 0.96 * best


def test_a_drafter_that_bluffs_is_not_believed() -> None:
    """It is sure of itself and wrong; where plain decoding is among the choices, it is taken."""
    plain = Choice(1, "none")
    here = world(
        staircase,
        choices=(*CHOICES, plain),
        prior={**prior_of(staircase), **{(b, plain): staircase(b, plain) - 0.5 for b in BUCKETS}},
    )
    here.decode(BLUFF, 32, 1000)
    rate, best = here.best(BLUFF, 32)
    assert best == plain
    assert here.decode(BLUFF, 32, 10_000) >= 0.97 * rate
    # And it comes back when there is something to draft again.
    here.decode(CODE, 32, 8000)
    assert here.decode(CODE, 32, 5000) >= 0.97 * here.best(CODE, 32)[0]


@pytest.mark.parametrize("extra", [0.0, 6.0])
def test_a_chain_is_taken_only_where_trees_cost_more_to_build_than_they_bring(extra: float) -> None:
    """The start-up measurement knows of no such cost."""

    def cost(batch_size: int, choice: Choice) -> float:
        return staircase(batch_size, choice) + (extra if choice.shape == "tree" else 0.0)

    here = world(cost, prior=prior_of(staircase), noise=0.05)
    here.decode(CODE, 8, 4000)
    rate, best = here.best(CODE, 8)
    assert (best.shape == "chain") == bool(extra)
    assert here.decode(CODE, 8, 5000) >= 0.95 * rate


def test_two_equal_widths_do_not_take_turns() -> None:
    """Outside of rounds that look at another, the plan changes a few times at most."""
    here = world(lambda *_: 10.0, choices=(Choice(33), Choice(65)), noise=0.03)
    here.decode(BLUFF, 8, 20_000)
    used = [choice for _, choice in here.history[::8]]
    common = max(set(used), key=used.count)
    assert used.count(common) >= 0.7 * len(used)


@pytest.mark.parametrize("text", [CODE, PROSE, BLUFF], ids=["code", "prose", "bluff"])
def test_what_wider_trees_would_accept_is_known_before_they_are_tried(text: Text) -> None:
    """From steps of the chain's width alone, within a few percent; narrower widths are counted exactly."""
    here = world(memory_bound, choices=CHOICES)
    here.chooser.plan = dict.fromkeys(BUCKETS, Choice(BLOCK))
    here.chooser.replan = lambda: None  # type: ignore[method-assign]
    here.decode(text, 8, 2000)
    for choice in CHOICES:
        near = 0.1 if choice.shape == "chain" or choice.width > BLOCK else 0.03
        assert here.chooser.rates.emitted(*choice) == pytest.approx(emitted(text, choice), rel=near, abs=0.06), str(
            choice
        )


def test_only_captured_widths_are_chosen() -> None:
    """A bucket's plan never names a width that no graph serves there, and takes any where none is served."""
    chooser = Chooser(CHOICES, BUCKETS, chain_width=BLOCK, fits=lambda width, size: size < 48 and width * size <= 300)
    here = World(chooser, memory_bound)
    here.decode(CODE, 16, 5000)
    assert {choice.width for _, choice in here.history} <= {3, 5, 9, 16}
    here.decode(CODE, 48, 1000)
    assert chooser.choose(48) in CHOICES


def test_ranks_that_adopt_a_plan_choose_the_same() -> None:
    """A plan travels as one small integer a bucket."""
    here = world(staircase, noise=0.2)
    other = Chooser(CHOICES, BUCKETS, chain_width=BLOCK)
    for batch_size in (1, 8, 48):
        here.decode(CODE, batch_size, 800)
        other.adopt(here.chooser.encoded())
        assert [other.choose(b) for b in range(1, 60)] == [here.chooser.choose(b) for b in range(1, 60)]


def test_nothing_to_choose_from_is_refused() -> None:
    """It names what was given."""
    with pytest.raises(RuntimeError, match="buckets"):
        Chooser(CHOICES, [], chain_width=BLOCK)
