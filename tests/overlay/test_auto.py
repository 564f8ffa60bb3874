# SPDX-License-Identifier: Apache-2.0
"""`auto` over real trees and a clock that tests set: what is observed, what is not, and ranks that stay together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.speculative.ddtree import moments
from sglang.srt.speculative.ddtree.accept import accept
from sglang.srt.speculative.ddtree.auto import Auto
from sglang.srt.speculative.ddtree.choice import PERIOD, SEASONED, Chooser, Step
from sglang.srt.speculative.ddtree.observing import Observer
from sglang.srt.speculative.ddtree.round_times import Choice
from sglang.srt.speculative.ddtree.tree import build_tree
from tests.overlay import host_clock
from tests.overlay.host_clock import HostClock
from tests.overlay.rank_processes import answers_of


WIDTHS, BLOCK = (2, 4, 8, 16), 8
CHOICES = (*(Choice(width) for width in WIDTHS), Choice(BLOCK, "chain"))
ALONE = SimpleNamespace(rank_in_group=0, world_size=1)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """By which steps are timed."""
    monkeypatch.setattr(moments, "time", HostClock())


def auto(group: Any = ALONE, tell: Any = None) -> Auto:
    """The lanes above, unmeasured."""
    chooser = Chooser(CHOICES, (1, 2, 4, 8), chain_width=BLOCK)
    return Auto(chooser, Observer(WIDTHS, "cpu"), group, tell)


def step(engine: Auto, batch_size: int, *, accepts: int, seconds: float = 0.0, waits: bool = False) -> Choice:
    """One step whose target takes the first `accepts` first choices of the drafter, and which the host may wait for."""
    choice = engine.begin(batch_size)
    probabilities = torch.tensor([0.8, 0.1, 0.05]).log().expand(batch_size, BLOCK - 1, 3)
    ids = torch.tensor([7, 8, 9]).expand(batch_size, BLOCK - 1, 3)
    if choice.shape == "chain":
        probabilities, ids = probabilities[..., :1], ids[..., :1]
    tree = build_tree(
        torch.zeros(batch_size, dtype=torch.int64), probabilities, ids, engine.grown_width(choice) - 1,
        width=choice.width, chain_seed=choice.shape == "chain",
    )  # fmt: skip
    targets = torch.where(tree.depths < accepts, 7, 3)
    acceptance = accept(tree, targets, prefix_lens=torch.zeros(batch_size, dtype=torch.int64), block_size=BLOCK)
    engine.count(tree, acceptance, (probabilities, ids))
    if waits:
        engine.meanwhile()
    moments.time.sleep(seconds)
    engine.end()
    return choice


def first_periods(engine: Auto, batch_size: int) -> None:
    """The first plans hold for less than a whole period."""
    while engine.chooser.period < PERIOD or engine._left < PERIOD:
        step(engine, batch_size, accepts=4)


def test_steps_arrive_as_they_were() -> None:
    """Batch size, choice, time, gap and counts, a period later at most."""
    told: list[Step] = []
    engine = auto(tell=told.extend)
    first_periods(engine, 3)
    assert told[0].milliseconds is None  # kernels may have to be compiled
    told.clear()
    engine.chooser.plan[4] = Choice(8)
    for _ in range(PERIOD):
        step(engine, 3, accepts=4, seconds=0.003)
    assert len(told) == PERIOD
    assert [one.batch_size for one in told] == [3] * PERIOD
    for one in told:
        assert one.choice == Choice(8)
        assert one.chain_accepted >= 3 * 4
        assert list(one.accepted) == sorted(one.accepted)
        assert one.accepted[0] == 3
        assert len(one.accepted) == 3
        assert list(one.expected) == sorted(one.expected)
        assert one.expected[0] == pytest.approx(3 * 0.8, rel=1e-5)
        assert len(one.expected) == 4  # grown one lane further than verified, and that is the widest
        if one is not told[0]:  # that may follow another choice
            assert one.milliseconds is not None
            assert one.milliseconds == pytest.approx(3.0, abs=0.1)
        assert one.gap == pytest.approx(0.0, abs=0.1)


def test_a_prefill_leaves_no_gap_and_steps_of_others_are_not_learned_from() -> None:
    """A step that a request chose for itself neither counts for the plan nor is observed."""
    told: list[Step] = []
    engine = auto(tell=told.extend)
    first_periods(engine, 1)
    engine.interrupt()
    told.clear()
    for number in range(PERIOD):
        if number == 4:
            engine.interrupt()
            engine.end()  # of the step that was interrupted: it is nobody's
        step(engine, 1, accepts=2)
    assert len(told) == PERIOD
    assert [one.gap is None for one in told] == [number in {0, 4} for number in range(PERIOD)]
    # What was learned of a choice's time is not lost where a prefill precedes every step.
    assert all(
        one.milliseconds is not None for one, before in zip(told[1:], told, strict=False) if one.choice == before.choice
    )


def test_a_plan_that_changes_nothing_is_observed_at_its_end_alone() -> None:
    """It holds for ever more steps, up to a number; all age by those that nobody saw, and a look ends it."""
    told: list[Step] = []
    periods = set()
    engine = auto(tell=told.extend)
    steps, longest = 200 * PERIOD, 40  # of 8 ms
    for _ in range(steps):
        seen, running = len(told), engine.chooser.plan[2]
        step(engine, 2, accepts=BLOCK - 1, seconds=0.008)
        periods.add(engine.chooser.period)
        assert len(told) - seen <= PERIOD
        if engine.chooser.plan[2] != engine.chooser.best(2) or running != engine.chooser.plan[2]:
            assert engine.chooser.period <= PERIOD
    assert {PERIOD, 2 * PERIOD, 4 * PERIOD} <= periods
    assert 0.9 * longest <= max(periods) <= longest
    assert len(told) < 0.6 * steps
    assert sum(engine.chooser.times.known(2, Choice(2))) > len(told)


def test_a_plan_for_long_is_observed_at_once_when_the_batch_changes() -> None:
    """It was made to last for a batch that is no more."""
    told: list[Step] = []
    engine = auto(tell=told.extend)
    while engine.chooser.period <= 2 * PERIOD:
        step(engine, 2, accepts=BLOCK - 1, seconds=0.008)
    told.clear()
    for _ in range(PERIOD):
        step(engine, 8, accepts=BLOCK - 1, seconds=0.008)
    assert [one.batch_size for one in told] == [8] * PERIOD


def test_a_plan_for_long_goes_on_where_the_batch_is_well_known() -> None:
    """Batches that come and go all the time would else have the host observe and plan all the time."""
    told: list[Step] = []
    engine = auto(tell=told.extend)
    for _ in range(2):  # the second time, 2 is known
        for _ in range(SEASONED):
            step(engine, 8, accepts=BLOCK - 1, seconds=0.008)
        while engine.chooser.period <= 2 * PERIOD or engine._left <= 2 * PERIOD:
            step(engine, 2, accepts=BLOCK - 1, seconds=0.008)
    told.clear()
    left = engine._left
    for number in range(left):
        assert engine._left == left - number
        step(engine, (8, 2)[number // PERIOD % 2], accepts=BLOCK - 1, seconds=0.008)
    assert len(told) == PERIOD


@pytest.mark.parametrize(("milliseconds", "longest"), [(40, PERIOD), (20, 2 * PERIOD)])
def test_a_plan_for_long_is_no_longer_where_steps_take_long(milliseconds: int, longest: int) -> None:
    """It holds for so many steps of the batch that it was made for, and for as much time of another one's."""
    engine = auto()
    for _ in range(4 * SEASONED):
        step(engine, 8, accepts=BLOCK - 1, seconds=0.001 * milliseconds)
    while engine.chooser.period <= 8 * PERIOD or engine._left <= 4 * PERIOD:
        step(engine, 2, accepts=BLOCK - 1, seconds=0.001)
    engine.begin(8)
    assert 0.9 * longest <= engine._left <= longest
    left = engine._left
    engine.end()
    step(engine, 2, accepts=BLOCK - 1, seconds=0.001)
    assert engine._left == left - 2  # which no way back makes longer


def test_who_waits_for_the_device_plans_meanwhile() -> None:
    """Once a period, from what had arrived before; the step's own part of the period is not lost by it."""
    told: list[list[Step]] = []
    engine = auto(tell=lambda steps: told.append(list(steps)))
    plans: list[int] = []
    plan = engine._plan
    engine._plan = lambda: (plans.append(engine._steps), plan())[1]
    for number in range(60 * PERIOD):
        step(engine, 2, accepts=0, seconds=0.001 * engine.chooser.choose(2).width, waits=True)
        assert engine._steps == number + 1
        assert 0 < engine._left <= engine.chooser.period
    assert len(told) == len(plans) == len(set(plans))
    assert [len(steps) for steps in told[:4]] == [0, 2, 3, 4]  # each by the plan behind
    assert engine.chooser.best(2).width <= 4


def test_a_report_that_fails_leaves_no_rank_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have the plan by then."""
    told: list[list[int]] = []
    monkeypatch.setattr(torch.distributed, "broadcast", lambda plan, **_: told.append(plan.tolist()))

    def report(_: list[Step]) -> None:
        raise OSError(28, "no space left on device")

    engine = auto(SimpleNamespace(rank_in_group=0, world_size=2, first_rank=0, cpu_group=None), report)
    while engine._left > 1:
        step(engine, 2, accepts=3)
    with pytest.raises(OSError, match="no space"):
        step(engine, 2, accepts=3)
    assert told == [engine.chooser.encoded()]


def test_no_plan_is_for_long_while_nothing_of_the_batch_has_arrived() -> None:
    """What is observed comes a period late: of the batch before, which is as quiet as can be."""
    engine = auto()
    assert engine._observer is not None
    collect, late = engine._observer.collect, [[]]
    engine._observer.collect = lambda: (late.append(collect()), late.pop(0))[1]
    while engine.chooser.period <= 2 * PERIOD:
        step(engine, 2, accepts=BLOCK - 1, seconds=0.008)
    for _ in range(6 * PERIOD):
        step(engine, 8, accepts=BLOCK - 1, seconds=0.008)
        assert engine._left <= PERIOD


def test_only_trees_that_are_counted_are_grown_wider(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the others nobody learns what more nodes would have got."""
    monkeypatch.setattr(f"{Auto.__module__}._ALL_COUNTED", 0)
    engine = auto()
    first_periods(engine, 3)
    engine.chooser.plan[4] = Choice(4)
    grown = []
    for _ in range(PERIOD):
        choice = engine.begin(3)
        grown.append(engine.grown_width(choice))
        engine.end()
    assert sorted(set(grown)) == [4, 8, 16]
    assert [width > 4 for width in grown] == [grown[0] > 4, grown[0] <= 4] * (PERIOD // 2)


def test_a_batch_larger_than_what_is_counted_says_so() -> None:
    """Sums are over as many requests as they claim."""
    told: list[Step] = []
    engine = auto(tell=told.extend)
    for _ in range(PERIOD):
        step(engine, 70, accepts=3)
    assert {one.requests for one in told} == {64}
    assert {one.accepted[0] for one in told} == {64.0}


def test_periods_that_do_not_arrive_are_dropped_and_decoding_goes_on() -> None:
    """A device that is far behind: no buffer is written that is still on its way."""
    told: list[Step] = []
    engine = auto(tell=told.extend)
    observer = engine._observer
    assert observer is not None
    collect, observer.collect = observer.collect, list  # nothing arrives
    for _ in range(10 * PERIOD):
        step(engine, 1, accepts=2)
    assert not told
    observer.collect = collect
    for _ in range(3 * PERIOD):
        step(engine, 1, accepts=2)
    assert 3 * PERIOD <= len(told) <= 7 * PERIOD


def test_a_width_that_pays_is_found() -> None:
    """The same time whatever the width, and a target that takes the drafter's word: a wide one; then none of it."""
    engine = auto()
    for _ in range(15 * PERIOD):
        step(engine, 2, accepts=BLOCK - 1, seconds=0.008)
    assert engine.chooser._best[2].width in {8, 16}
    for _ in range(60 * PERIOD):
        step(engine, 2, accepts=0, seconds=0.001 * engine.chooser.choose(2).width)
    assert engine.chooser._best[2].width <= 4


def rank_with_its_own_clock(rank: int, _: int) -> dict[str, Any]:
    """What a step takes on a rank has nothing to do with what others do."""
    host_clock.install(HostClock())
    engine = auto(get_tp_group())
    chosen, alone = [], auto()
    for number in range(30 * PERIOD):
        batch_size = 1 + number // 40 % 8
        width = engine.chooser.choose(batch_size).width
        seconds = 0.0002 * (width if rank % 2 == 0 else 17 - width)
        chosen.append(step(engine, batch_size, accepts=2, seconds=seconds, waits=True))
        if rank and number < 15 * PERIOD:  # what this rank would have chosen by itself
            step(alone, batch_size, accepts=6, seconds=0.0002 * (17 - alone.chooser.choose(batch_size).width))
    own = [alone.chooser.choose(batch_size) for batch_size in (1, 2, 4, 8)]
    return {"chosen": chosen, "own": own, "plan": engine.chooser.encoded()}


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_switch_at_the_same_step(ranks: int) -> None:
    """Clocks and texts differ between them; only the first rank's matter."""
    answers = answers_of(rank_with_its_own_clock, ranks, seconds=200)
    for answer in answers:
        assert answer["chosen"] == answers[0]["chosen"]
        assert answer["plan"] == answers[0]["plan"]
    assert len(set(answers[0]["chosen"])) > 2
    assert any(answers[rank]["own"] != [CHOICES[i] for i in answers[0]["plan"][1:5]] for rank in range(1, ranks))
