# SPDX-License-Identifier: Apache-2.0
"""What rounds take, learned from looks between rounds of the choice in use: what is believed, and when."""

from __future__ import annotations

import itertools

import pytest
from sglang.srt.speculative.ddtree import start_up_times
from sglang.srt.speculative.ddtree.round_times import Choice, RoundTimes
from sglang.srt.speculative.ddtree.start_up_times import time_graphs


NARROW, USED, WIDE, CHAIN, NONE = Choice(9), Choice(16), Choice(33), Choice(16, "chain"), Choice(1, "none")
#: Milliseconds of the graphs: a wide tree's takes 2 more.
GRAPHS = {NARROW: 5.0, USED: 6.0, WIDE: 8.0, CHAIN: 6.0, NONE: 4.0}


def times_of(*, prior: bool = True) -> RoundTimes:
    """One bucket, in which a choice is in use that takes ten milliseconds."""
    times = RoundTimes([8], {(8, choice): time for choice, time in GRAPHS.items()} if prior else None)
    run(times, USED, 10.0, 3)
    return times


def run(times: RoundTimes, choice: Choice, took: float, periods: int = 1) -> None:
    """Rounds of a choice for so many periods."""
    for _ in range(periods):
        times.observe(8, choice, [(took, None)] * 8)


def look(times: RoundTimes, choice: Choice, took: float, level: float = 1.0) -> None:
    """A look at a choice, between rounds of the one in use."""
    run(times, USED, 10.0 * level)
    run(times, choice, took * level)
    run(times, USED, 10.0 * level)


def known(times: RoundTimes, **found: float) -> None:
    """Choices that take so long, looked at often enough to be known."""
    for name, took in found.items():
        for _ in range(3):
            look(times, {"narrow": NARROW, "wide": WIDE, "chain": CHAIN, "none": NONE}[name], took)


@pytest.mark.parametrize("prior", [True, False])
def test_a_look_is_compared_with_what_ran_right_before_and_right_after_it(prior: bool) -> None:
    """In a phase in which everything takes 1.6 times as long a look shows what it shows in any other."""
    times = times_of(prior=prior)
    known(times, wide=11.0)
    for level in (1.6, 1.3, 1.6, 1.0):
        look(times, WIDE, 11.0, level)
        assert times.expected(8, WIDE) / times.expected(8, USED) == pytest.approx(1.1)
    run(times, USED, 16.0, 6)
    assert times.expected(8, USED) == pytest.approx(16.0)
    assert times.expected(8, WIDE) == pytest.approx(17.6)


def test_a_look_between_two_phases_tells_nothing_and_has_to_be_repeated() -> None:
    """It would seem 40 % slower than it is, or faster."""
    times = times_of()
    known(times, wide=11.0)
    for before, after in ((10.0, 15.0), (15.0, 10.0)):
        run(times, USED, before, 2)
        assert times.is_settled(8)
        run(times, WIDE, 15.0)
        assert times.is_pending(8, WIDE)
        age = times.known(8, WIDE)[1]
        run(times, USED, after)
        assert not times.is_pending(8, WIDE)
        assert not times.is_settled(8)
        assert times.known(8, WIDE)[1] == age + 8
        assert times.expected(8, WIDE) / times.expected(8, USED) == pytest.approx(1.1)


@pytest.mark.parametrize("prior", [True, False])
def test_a_stall_that_hits_a_look_alone_is_believed_only_when_it_comes_again(prior: bool) -> None:
    """Until then it does not count as a look."""
    times = times_of(prior=prior)
    known(times, wide=11.0)
    for took, believed, is_counted in ((44.0, 11.0, False), (30.0, 30.0, True)):
        look(times, WIDE, took)
        assert times.expected(8, WIDE) == pytest.approx(believed)
        assert (times.known(8, WIDE)[1] <= 8) == is_counted


@pytest.mark.parametrize(
    ("choice", "took", "most"), [(WIDE, 15.0, 12.0), (NARROW, 13.0, 10.0), (CHAIN, 14.0, 10.0)], ids=str
)
def test_nothing_takes_more_than_its_graph_explains_until_that_was_seen_twice(
    choice: Choice, took: float, most: float
) -> None:
    """The host does the same for every width: a first look that was disturbed keeps none away, and none in use."""
    times = times_of()
    look(times, choice, took)
    assert times.expected(8, choice) <= 1.1 * most
    look(times, choice, took)
    assert times.expected(8, choice) <= 1.1 * most
    look(times, choice, took)
    assert times.expected(8, choice) == pytest.approx(took)
    # And it is forgotten as soon as a look shows what start-up said.
    look(times, choice, most)
    assert times.expected(8, choice) == pytest.approx(most)


def test_what_seemed_too_good_does_not_pass_for_a_host_that_got_slower() -> None:
    """One round made it seem as fast; what was in use before is tried again, and then both are known."""
    times = times_of()
    run(times, USED, 10.0, 4)
    times.observe(8, WIDE, [(10.0, None)])
    run(times, USED, 10.0)
    run(times, WIDE, 14.0, 4)
    assert times.least(8, USED) <= 10.0
    run(times, USED, 10.0)
    run(times, WIDE, 14.0)
    assert times.expected(8, WIDE) / times.expected(8, USED) == pytest.approx(1.4, rel=0.05)
    assert times.least(8, USED) == pytest.approx(times.expected(8, USED))


def test_what_nothing_is_drafted_for_may_save_more_than_graphs() -> None:
    """The host does less for it."""
    times = times_of()
    look(times, NONE, 4.5)
    assert times.expected(8, NONE) == pytest.approx(4.5)


def test_the_level_is_that_of_many_rounds() -> None:
    """A stall of two periods moves nothing; five periods do, though the host hides none of what graphs take more."""
    times = times_of()
    known(times, wide=11.0)
    run(times, USED, 10.0, 6)
    run(times, USED, 40.0, 2)
    assert times.expected(8, WIDE) == pytest.approx(11.0)
    run(times, USED, 40.0, 3)
    assert times.expected(8, USED) == pytest.approx(40.0)
    assert times.expected(8, WIDE) == pytest.approx(42.0)


def test_of_two_choices_the_one_that_is_known_less_well_learns() -> None:
    """One came into use after a look that was disturbed: looks at others are right about them."""
    times = times_of()
    known(times, wide=11.0)
    run(times, NARROW, 9.8)
    run(times, NARROW, 9.2)
    run(times, WIDE, 11.0)
    run(times, NARROW, 9.2)
    assert times.expected(8, USED) / times.expected(8, WIDE) == pytest.approx(10.0 / 11.0)
    assert times.expected(8, NARROW) / times.expected(8, WIDE) == pytest.approx(9.5 / 11.0, rel=0.01)


def test_what_all_are_compared_with_is_looked_at_again_if_it_was_hardly_measured() -> None:
    """A server's first steps may run into a stall, beside which all others seem fast."""
    times = RoundTimes([8], {(8, choice): time for choice, time in GRAPHS.items()})
    times.observe(8, USED, [(40.0, None)] * 3)
    run(times, WIDE, 12.0, 4)
    assert times.expected(8, USED) == pytest.approx(12.0)
    assert times.least(8, USED) <= 10.5


def test_what_came_into_use_after_a_stall_is_compared_with_what_ran_in_it() -> None:
    """A stall that a bucket begins in is over when the batch comes back: nothing ran beside what is in use then."""
    times = RoundTimes([8], {(8, choice): time for choice, time in GRAPHS.items()})
    run(times, USED, 40.0)
    run(times, WIDE, 12.0, 6)
    # All that is known of the other is that it took more. It is hoped to be better, and one look tells.
    assert times.least(8, USED) <= 10.5
    run(times, USED, 10.0)
    run(times, WIDE, 12.0, 6)
    assert times.expected(8, WIDE) == pytest.approx(12.0)
    assert times.expected(8, USED) == pytest.approx(10.0)


def test_what_the_choice_in_use_takes_is_seen_whatever_start_up_says() -> None:
    """Start-up said that it takes little more than another, and that one is not looked at while this is believed."""
    times = RoundTimes([8], {(8, choice): time / 1000.0 for choice, time in GRAPHS.items()})
    run(times, USED, 10.0, 3)
    run(times, WIDE, 20.0, 6)
    for _ in range(2):
        run(times, USED, 10.0)
        run(times, WIDE, 20.0)
    assert times.expected(8, WIDE) == pytest.approx(20.0)
    assert times.expected(8, USED) == pytest.approx(10.0)


def test_times_of_zero_are_none() -> None:
    """All else divides by them."""
    times = RoundTimes([8], dict.fromkeys(((8, choice) for choice in GRAPHS), 0.0))
    run(times, USED, 0.0)
    assert times.known(8, USED) == (0, 0)
    run(times, USED, 10.0)
    run(times, WIDE, 0.0)
    run(times, USED, 0.0)
    run(times, USED, 10.0)
    assert times.expected(8, USED) == pytest.approx(10.0)
    assert times.expected(8, WIDE) >= 10.0


def test_no_gap_is_negative_and_no_bucket_without_one_is_zero() -> None:
    """It is that of the nearest bucket."""
    times = RoundTimes([4, 8])
    times.observe(4, USED, [(10.0, -1.0)])
    assert times.gap(8) == 0.0
    times.observe(4, USED, [(10.0, 2.0)])
    assert times.gap(8) == times.gap(4) > 0.0
    assert times.expected(8, USED) == pytest.approx(1.0 + times.gap(4))  # one that start-up says nothing of


def test_a_device_that_waits_for_the_host_makes_all_choices_equal() -> None:
    """What a step takes longer, the gap behind it is shorter by; a prefill hides one in three gaps."""
    times = times_of()
    for _ in range(4):
        for choice, step in ((USED, 10.0), (WIDE, 12.0), (USED, 10.0)):
            times.observe(8, choice, [(step, None if at % 3 == 0 else 20.0 - step) for at in range(8)])
    assert times.expected(8, USED) == times.expected(8, WIDE) == pytest.approx(20.0)


def test_a_pause_is_no_gap() -> None:
    """A server that was paused goes on with its batch, and no prefill tells of it."""
    times = times_of()
    for gap in (0.5, 5000.0, 0.5):
        times.observe(8, USED, [(10.0, gap), (10.0, None)])
    assert times.gap(8) == pytest.approx(0.5)
    assert times.expected(8, USED) == pytest.approx(10.5, rel=0.05)


def test_rounds_shorter_than_their_graphs_show_that_start_up_was_disturbed() -> None:
    """As on a GPU on which another engine started as well; one bucket says nothing about the others."""
    times = RoundTimes((8, 16), {(size, choice): 40.0 for size in (8, 16) for choice in (USED, WIDE)})
    for _ in range(2):
        times.observe(8, USED, [(10.0, None)] * 8)
    assert times.least(8, WIDE) == pytest.approx(40.0)
    times.observe(8, USED, [(10.0, None)] * 8)
    assert times.expected(8, WIDE) < 20.0
    assert times.expected(16, WIDE) == pytest.approx(40.0)
    for _ in range(4):
        times.observe(16, USED, [(36.0, None)] * 8)
    assert times.least(16, WIDE) == pytest.approx(40.0)


def test_a_batch_that_never_stays_shows_it_as_well() -> None:
    """Three rounds at a time, as often as it takes; one that takes its time begins the count anew."""
    times = RoundTimes((8,), {(8, choice): 40.0 for choice in (USED, WIDE)})
    for _ in range(3):
        times.observe(8, USED, [(36.0, None)] * 3)
        for _ in range(5):
            times.observe(8, USED, [(10.0, None)] * 3)
        assert times.least(8, WIDE) == pytest.approx(40.0)
    times.observe(8, USED, [(10.0, None)] * 3)
    assert times.least(8, WIDE) < 20.0


def test_a_graph_takes_what_its_fastest_replay_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that stalls while it launches makes a small graph seem to take eight times as long."""
    clock = itertools.accumulate([0.0, 1.0, 0.9, 1.2, 0.0, 5.0, 5.0, 5.0])
    synchronized = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = next(clock)

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    monkeypatch.setattr(start_up_times.torch.cuda, "Event", Event)
    monkeypatch.setattr(start_up_times.torch.cuda, "synchronize", lambda: synchronized.append(True))
    found = time_graphs((9, 16, 33), (1,), lambda width, _: None if width == 16 else (lambda: None))
    assert found == {(9, 1): pytest.approx(0.9), (33, 1): pytest.approx(5.0)}
    assert synchronized == [True]
