# SPDX-License-Identifier: Apache-2.0
"""The choice of a width, against every fixed one: what it costs to find out, and what it costs to keep looking.

A simulation (`benchmarks/choosing.py` prints more of it): `decode` gives the tokens as a part of what the best fixed
choice would have got.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest


sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from sglang.srt.speculative.ddtree.choice import Choice, Chooser, Step

from choosing_costs import (
    BUCKETS,
    Cost,
    compute_bound,
    graphs,
    hidden,
    host_bound,
    memory_bound,
    overlapped,
    overlapped_graphs,
    staircase,
    start_up,
)
from choosing_texts import BLOCK, BLUFF, CHOICES, CODE, NONE, PROSE, Text, emitted
from choosing_world import World


def world(cost: Cost, prior: Any = None, **kwargs: Any) -> World:
    """A server whose start-up saw the cost but for half a millisecond, or what is given."""
    return World(cost, start_up(cost, without=0.5) if prior is None else prior, **kwargs)


#: What steps take, and what start-up sees of it.
REGIMES = {
    "host": (host_bound, graphs),
    "compute": (compute_bound, graphs),
    "hidden": (hidden, lambda size, choice: 0.3 * graphs(size, choice)),
    "stairs": (staircase, lambda size, choice: staircase(size, choice) - 0.5),
}


@pytest.mark.parametrize("batch_size", [1, 4, 16, 48])
@pytest.mark.parametrize("regime", REGIMES)
def test_a_thousand_steps_are_within_three_percent_of_the_best_width_and_the_next_within_one_and_a_half(
    regime: str, batch_size: int
) -> None:
    """From the first step on, whatever finding out has cost included; medians over three servers."""
    cost, prior = REGIMES[regime]
    cold, warm = [], []
    for seed in range(3):
        here = world(cost, start_up(prior), seed=seed)
        cold.append(here.decode(PROSE, batch_size, steps=1000))
        warm.append(here.decode(PROSE, batch_size, steps=1000))
    assert statistics.median(cold) >= 0.97
    assert statistics.median(warm) >= 0.985


@pytest.mark.parametrize("text", [CODE, PROSE], ids=["code", "prose"])
@pytest.mark.parametrize("batch_size", [2, 8, 32])
def test_three_hundred_steps_are_within_five_percent(text: Text, batch_size: int) -> None:
    """A few seconds, as one measurement of a benchmark lasts."""
    found = [world(host_bound, start_up(graphs), seed=seed).decode(text, batch_size, steps=300) for seed in range(3)]
    assert statistics.median(found) >= 0.95


@pytest.mark.parametrize("batch_size", [1, 16, 48])
def test_a_start_up_measurement_that_is_wrong_is_outlived(batch_size: int) -> None:
    """By 40 % either way."""
    here = world(staircase, start_up(staircase, without=0.5, wrong=0.4))
    here.decode(CODE, batch_size, steps=600)
    assert here.decode(CODE, batch_size, steps=600) >= 0.97


@pytest.mark.parametrize("batch_size", [1, 16, 48])
def test_without_a_start_up_measurement_widths_are_tried_one_after_the_other(batch_size: int) -> None:
    """Engines without graphs have none."""
    here = world(compute_bound, {})
    here.decode(PROSE, batch_size, steps=600)
    assert here.decode(PROSE, batch_size, steps=600) >= 0.94


@pytest.mark.parametrize("batch_size", [1, 32])
def test_noisy_clocks_do_not_matter(batch_size: int) -> None:
    """Steps of 15 % spread, three in a hundred up to ten times too long, and a prefill before every other step."""
    here = world(staircase, noise=0.15, outliers=0.03, interrupted=0.5)
    here.decode(CODE, batch_size, steps=500)
    assert here.decode(CODE, batch_size, steps=1000) >= 0.97


@pytest.mark.parametrize("batch_size", [4, 16])
def test_stalls_of_several_steps_keep_no_choice_away(batch_size: int) -> None:
    """Ten steps take four times as long, once in 400: the choice that runs then is looked at again soon."""
    for seed in range(40, 44):
        here = world(host_bound, start_up(graphs), seed=seed, stalls=1 / 400)
        assert here.decode(PROSE, batch_size, steps=3000) >= 0.975


@pytest.mark.parametrize("phase", range(0, 16, 4))
def test_one_stall_is_forgotten(phase: int) -> None:
    """Wherever in a period it begins, the best choice is soon in use again."""
    for seed in range(3):
        here = world(host_bound, start_up(graphs), seed=seed, outliers=0.0)
        here.decode(PROSE, 16, steps=600 + phase)
        here.stall()
        here.decode(PROSE, 16, steps=100)
        assert here.decode(PROSE, 16, steps=500) >= 0.97


def test_steps_between_prefills_are_timed() -> None:
    """Where a prefill precedes every step no gap is known, but what a step takes is."""
    here = world(host_bound, start_up(graphs), interrupted=1.0)
    here.decode(PROSE, 16, steps=200)
    assert here.chooser.times.known(16, Choice(BLOCK))[0] > 50
    assert here.chooser.times.gap(16) == 0.0


@pytest.mark.parametrize("batch_size", [1, 8])
def test_a_first_measurement_that_was_disturbed_is_soon_forgotten(batch_size: int) -> None:
    """Every choice's first steps take twice as long as they will: a compiler, caches, a page that is missing."""
    here = world(memory_bound, noise=0.02, first=2.0)
    here.decode(CODE, batch_size, steps=300)
    assert here.decode(CODE, batch_size, steps=500) >= 0.97


@pytest.mark.parametrize("batch_size", [4, 24])
def test_another_workload_is_noticed_within_a_hundred_steps(batch_size: int) -> None:
    """Code, prose and code again, which want different widths."""
    here = world(staircase)
    for text in (CODE, PROSE, CODE):
        here.decode(text, batch_size, steps=100)
        assert here.decode(text, batch_size, steps=300) >= 0.97


@pytest.mark.parametrize("batch_size", [8, 48])
def test_a_drafter_that_bluffed_is_believed_again(batch_size: int) -> None:
    """What wide trees were worth moves with what narrow ones are: else none of them would ever be tried again."""
    here = world(host_bound, start_up(graphs))
    for text in (CODE, BLUFF, CODE):
        here.decode(text, batch_size, steps=150)
        share = here.decode(text, batch_size, steps=300)
    assert share >= 0.95


def test_batches_that_grow_and_shrink_find_their_width_again() -> None:
    """What was learned in a bucket is there when the batch comes back."""
    here = world(staircase)
    for batch_size in (1, 8, 48, 32, 16, 2, 48, 1) * 2:
        here.decode(CODE, batch_size, steps=60)
    assert here.tokens >= 0.96 * here.best_tokens


def test_contexts_that_grow_are_followed() -> None:
    """Attention over a longer prefix slows every width, the wide ones most, and so moves the best one."""
    length = [0.0]

    def longer(batch_size: int, choice: Choice) -> float:
        return staircase(batch_size, choice) + length[0] * batch_size * (1.0 + choice.width / 16)

    here = world(longer, start_up(staircase, without=0.5))
    for _ in range(40):
        length[0] += 0.02
        here.decode(CODE, 8, steps=40)
    assert here.tokens >= 0.96 * here.best_tokens


def test_a_drafter_that_bluffs_is_not_believed() -> None:
    """It is sure of itself and wrong; where plain decoding is among the choices, it is taken."""
    here = world(host_bound, start_up(graphs), choices=(*CHOICES, NONE))
    here.decode(BLUFF, 16, steps=200)
    assert here.best(BLUFF, 16)[1] == NONE
    assert here.decode(BLUFF, 16, steps=1000) >= 0.95
    # And it comes back when there is something to draft again.
    here.decode(CODE, 16, steps=1500)
    assert here.decode(CODE, 16, steps=500) >= 0.97


@pytest.mark.parametrize("extra", [0.0, 6.0])
def test_a_chain_is_taken_only_where_trees_cost_more_to_build_than_they_bring(extra: float) -> None:
    """The start-up measurement knows of no such cost."""

    def cost(batch_size: int, choice: Choice) -> float:
        return staircase(batch_size, choice) + (extra if choice.shape == "tree" else 0.0)

    here = world(cost, start_up(staircase, without=0.5))
    here.decode(CODE, 8, steps=400)
    assert (here.best(CODE, 8)[1].shape == "chain") == bool(extra)
    assert here.decode(CODE, 8, steps=500) >= 0.95


def test_two_equal_widths_do_not_take_turns() -> None:
    """The plan changes a few times at most, and looks are short."""
    here = world(lambda *_: 10.0, choices=(Choice(33), Choice(65)), noise=0.03)
    here.decode(BLUFF, 8, steps=2000)
    changes = sum(one != next_ for one, next_ in zip(here.history, here.history[1:], strict=False))
    assert changes <= 60


def test_a_look_lasts_one_period() -> None:
    """What it shows arrives a period later: until then it is not looked at once more."""
    prior = {(8, choice): 12.0 if choice.width > BLOCK else 10.0 for choice in CHOICES}
    chooser, looks = Chooser(CHOICES, [8], chain_width=BLOCK, prior=prior), []
    accepted = [8.0 * tokens for tokens in (1, 2, 4, 8)]
    step = Step(8, Choice(BLOCK), 8, 14.0, 0.5, accepted=accepted, expected=[*accepted, 8 * 9.0])
    for _ in range(6):
        chooser.observe([step] * 8)
        chooser.replan()
        looks.append(chooser.choose(8) == Choice(33))
    assert chooser.best(8) == Choice(BLOCK)
    assert looks[:3] == [True, False, True]


def test_a_look_ends_when_the_batch_changes() -> None:
    """It is none for the batch that comes there later: that begins with what is known."""
    prior = {(bucket, choice): 12.0 if choice.width > BLOCK else 10.0 for choice in CHOICES for bucket in (4, 8, 16)}
    chooser = Chooser(CHOICES, (4, 8, 16), chain_width=BLOCK, prior=prior)
    accepted = [8.0 * tokens for tokens in (1, 2, 4, 8)]
    step = Step(8, Choice(BLOCK), 8, 14.0, 0.5, accepted=accepted, expected=[*accepted, 8 * 9.0])
    chooser.observe([step] * 8)
    chooser.replan()
    assert chooser.choose(8) == Choice(33) != chooser.best(8)
    chooser.observe([dataclasses.replace(step, batch_size=16)] * 8)
    chooser.replan()
    assert chooser.choose(8) == chooser.best(8)


def test_looks_that_lose_much_are_short() -> None:
    """Where steps without a draft are far better than any tree, each look costs a few percent of a hundred steps."""
    here = world(overlapped, start_up(overlapped_graphs), choices=(*CHOICES, NONE))
    here.decode(PROSE, 48, steps=1000)
    begin = len(here.history)
    assert here.best(PROSE, 48)[1] == NONE
    assert here.decode(PROSE, 48, steps=2000) >= 0.98
    runs = [len(list(run)) for choice, run in itertools.groupby(here.history[begin:]) if choice != NONE]
    assert runs
    assert max(runs) <= 3


@pytest.mark.parametrize("text", [CODE, PROSE, BLUFF], ids=["code", "prose", "bluff"])
def test_what_wider_trees_would_accept_is_known_before_they_are_tried(text: Text) -> None:
    """From steps of the chain's width alone, within a few percent; narrower widths are counted exactly."""
    here = world(memory_bound)
    here.chooser.replan = lambda *_: None  # type: ignore[method-assign]  # the first choice stays
    here.decode(text, 8, steps=200)
    for choice in CHOICES:
        near = 0.1 if choice.shape == "chain" or choice.width > BLOCK else 0.03
        assert here.chooser.rates.emitted(*choice) == pytest.approx(emitted(text, choice), rel=near, abs=0.06), str(
            choice
        )


def test_only_captured_widths_are_chosen() -> None:
    """A bucket's plan never names a width that no graph serves there, and takes any where none is served."""
    here = World(memory_bound, fits=lambda width, size: width * size <= 300)
    here.decode(CODE, 16, steps=500)
    assert {choice.width for choice in here.history} <= {3, 5, 9, 16}
    chooser = Chooser(CHOICES, BUCKETS, chain_width=BLOCK, fits=lambda _, size: size < 48)
    assert chooser.choose(48) in CHOICES


def test_ranks_that_adopt_a_plan_choose_the_same() -> None:
    """A plan travels as two small integers a bucket."""
    here = world(staircase, noise=0.2)
    other = Chooser(CHOICES, BUCKETS, chain_width=BLOCK)
    for batch_size in (1, 8, 48):
        here.decode(CODE, batch_size, steps=80)
        other.adopt(here.chooser.encoded())
        assert (other.period, other.lasts) == (here.chooser.period, here.chooser.lasts)
        assert [other.choose(b) for b in range(1, 60)] == [here.chooser.choose(b) for b in range(1, 60)]


def test_nothing_to_choose_from_is_refused() -> None:
    """It names what was given."""
    with pytest.raises(RuntimeError, match="buckets"):
        Chooser(CHOICES, [], chain_width=BLOCK)
