# SPDX-License-Identifier: Apache-2.0
"""The plan of runs, the statistics and the advice of `tune`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import pytest

from ddtree_overlay.reports import plain
from ddtree_overlay.tuning.advice import Advice, advise
from ddtree_overlay.tuning.cells import Reply, Sample, against_chain, cells, difference, quantile
from ddtree_overlay.tuning.lines import advice_lines, table_lines
from ddtree_overlay.tuning.plan import Run, Settings, dropped, pick, plan_runs
from ddtree_overlay.tuning.served import Arm, Served


CHAIN, EIGHT, AUTO = Arm("chain", "chain"), Arm("8", 8), Arm("auto", None)
ARMS = {"none": Arm("none", 0), "chain": CHAIN, "8": EIGHT, "64": Arm("64", 64), "auto": AUTO}
#: Arm -> tokens/s of each round, at one concurrency.
Rates = Mapping[str, Sequence[float]]


def served(setting: int | str = "auto", budgets: tuple[int, ...] = (8, 15, 64)) -> Served:
    overrides = ("chain", *budgets) if len(budgets) > 1 else ()
    return Served("0.5.11", "d61ee96d3814", setting, budgets, overrides, 16, 48, True, "qwen")


def samples(levels: Mapping[int, Rates], error: str = "") -> list[Sample]:
    """Runs of four requests of 25 tokens in 10 steps each, as fast as they should be."""
    made = []
    for level, rates in levels.items():
        for arm, by_round in rates.items():
            for number, rate in enumerate(by_round, 1):
                replies = (Reply(0.5, 25, 10, error), Reply(1.0, 25, 10), Reply(0.25, 25, 10), Reply(4.0, 25, 10))
                tokens = sum(r.tokens for r in replies if not r.error)
                made.append(Sample(Run(number, level, ARMS[arm]), tokens / rate, replies))
    return made


def advice(levels: Mapping[int, Rates], server: Served | None = None) -> Advice:
    return advise(cells(samples(levels)), server or served())


def test_every_round_has_every_arm_at_every_concurrency_after_a_warm_up():
    """Round 0 warms up; each other round is whole, so that a slow minute is slow for all arms."""
    runs = plan_runs([CHAIN, EIGHT, AUTO], Settings((1, 4), rounds=3))

    assert [run.warm_up for run in runs] == [True] * 6 + [False] * 18
    for number in range(4):
        of_round = [(r.concurrency, r.arm.name) for r in runs if r.round == number]
        assert sorted(of_round) == sorted((c, a.name) for c in (1, 4) for a in (CHAIN, EIGHT, AUTO))
        assert [c for c, _ in of_round] == [1, 1, 1, 4, 4, 4]


def test_no_arm_always_follows_the_same_one():
    """What the arm before leaves behind (caches, heat) is not always the same arm's gain."""
    runs = plan_runs([CHAIN, EIGHT, AUTO], Settings((1,), rounds=6))
    before = {(b.arm.name, a.arm.name) for a, b in itertools.pairwise(runs) if a.round == b.round}

    assert before >= {("8", "chain"), ("chain", "8"), ("auto", "8"), ("8", "auto")}


def test_arms_of_a_round_get_the_same_prompts_and_rounds_others():
    """Arms are compared round by round, on the same work."""
    names = [f"p{i}" for i in range(5)]

    assert pick(names, Run(1, 1, CHAIN), 3) == pick(names, Run(1, 1, AUTO), 3) == ["p0", "p1", "p2"]
    assert pick(names, Run(2, 1, CHAIN), 3) == ["p3", "p4", "p0"]
    assert pick(["only"], Run(3, 1, CHAIN), 3) == ["only"] * 3


def test_a_run_has_at_least_two_requests_for_each_in_flight():
    """Otherwise most of a run would be its beginning and its end."""
    settings = Settings((1, 16), requests=8)

    assert (settings.size(1), settings.size(16)) == (8, 32)


def test_requests_ask_for_the_budget_of_their_arm():
    """`auto` asks for nothing: a batch with one request that asks for nothing takes the server's own choice."""
    settings = Settings((1,), max_new_tokens=64)

    assert settings.sampling(EIGHT) == {
        "temperature": 0.0,
        "max_new_tokens": 64,
        "custom_params": {"ddtree_budget": 8},
    }
    assert "custom_params" not in settings.sampling(AUTO)
    assert settings.sampling(CHAIN, most=16)["max_new_tokens"] == 16


def test_what_was_not_measured_is_said_by_concurrency_and_round():
    """A bound on the time drops rounds; the reader is told which."""
    runs = plan_runs([CHAIN, EIGHT], Settings((1, 4), rounds=2))
    done = [run for run in runs if run.round == 1 or (run.round == 2 and run.concurrency == 1)]

    assert dropped(runs, runs) == []
    assert dropped(runs, done) == ["4 at a time, chain, 8: 1 round (2)"]


def test_a_cell_holds_the_median_its_spread_and_the_latencies():
    """Latencies by nearest rank over all rounds; accept length as SGLang counts it, tokens a verify step."""
    (cell,) = cells(samples({4: {"8": [100, 130, 110]}}))

    assert (cell.arm, cell.concurrency, cell.requests) == ("8", 4, 12)
    assert cell.tokens_per_s.median == pytest.approx(110)
    assert (cell.tokens_per_s.least, cell.tokens_per_s.most) == (pytest.approx(100), pytest.approx(130))
    assert (cell.accept_length, cell.p50, cell.p95) == (2.5, 0.5, 4.0)


@pytest.mark.parametrize(
    ("values", "share", "found"), [([1], 0.5, 1), ([1, 2], 0.5, 1), (range(1, 101), 0.95, 95), ([1, 2, 3], 0.95, 3)]
)
def test_quantiles_are_values_that_were_measured(values, share, found):
    """Nearest rank: no value between two requests is made up."""
    assert quantile(list(values), share) == found


def test_a_run_with_a_failed_request_is_no_rate_but_its_errors_are_counted():
    """One request less in flight is another concurrency; the cell must not look faster or slower for it."""
    good = samples({4: {"8": [100, 100]}})
    bad = samples({4: {"8": [900]}}, error="no answer within 60 s")
    (cell,) = cells([*good, *[Sample(Run(3, 4, EIGHT), s.seconds, s.replies) for s in bad]])

    assert cell.tokens_per_s.most == pytest.approx(100)
    assert cell.errors == {"no answer within 60 s": 1}
    assert cells(bad) == []


def test_warm_up_is_not_counted():
    """Round 0 has compilations and cold caches in it."""
    warm = Sample(Run(0, 1, EIGHT), 1.0, (Reply(1.0, 5, 1),))

    assert cells([warm]) == []


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [
        ([120, 130, 110], [100, 105, 100], "faster"),
        ([90, 90, 80], [100, 100, 95], "slower"),
        # The medians differ by a fifth, but not in every round.
        ([120, 99, 130], [100, 100, 100], "none"),
        # Steady, and not worth a word.
        ([100.5, 100.5, 100.5], [100, 100, 100], "none"),
        ([120, 130], [100, 100], "unknown"),
    ],
)
def test_a_difference_is_one_only_if_every_round_says_so(ours, theirs, verdict):
    """Compared round by round: a machine that becomes slower for both hides nothing."""
    theirs_cell, ours_cell = cells(samples({1: {"8": ours, "chain": theirs}}))

    assert difference(ours_cell, theirs_cell).verdict == verdict


def test_rounds_are_paired_by_number():
    """An arm that lost a round is compared on the others, not on the next one's prompts."""
    made = samples({1: {"8": [110, 220, 330], "chain": [100, 200, 300]}})
    theirs, ours = cells([s for s in made if not (s.run.arm is CHAIN and s.run.round == 1)])

    found = difference(ours, theirs)
    assert found.rounds == 2 and found.ratio.median == pytest.approx(1.1)


def test_auto_is_recommended_when_it_is_close_to_the_best_everywhere():
    """The flags name the budgets that it chooses among; the gain over the chain is said at each concurrency."""
    found = advice(
        {
            1: {"chain": [100] * 3, "64": [150] * 3, "auto": [149] * 3},
            4: {"chain": [400] * 3, "64": [300] * 3, "auto": [401] * 3},
        }
    )

    assert found.arm == "auto"
    assert found.flags == "--speculative-ddtree-budget auto --speculative-ddtree-budgets 8,15,64"
    assert [(b.concurrency, b.arm, b.as_good) for b in found.best] == [(1, "64", ("auto",)), (4, "auto", ("chain",))]
    assert found.best[0].against_chain.verdict == "faster"
    assert found.best[1].against_chain.verdict == "none"


def test_a_fixed_budget_is_recommended_where_auto_loses():
    """The one that loses least where it loses most."""
    found = advice({1: {"chain": [100] * 3, "8": [140] * 3, "auto": [110] * 3}})

    assert (found.arm, found.flags) == ("8", "--speculative-ddtree-budget 8")
    assert "auto has at least 79%" in found.why


def test_different_budgets_at_different_concurrencies_speak_for_auto_also_where_it_was_not_measured():
    """With the budgets that are best somewhere and the chain's width, and the reservation that it was not measured."""
    levels = {
        1: {"chain": [100] * 3, "8": [110] * 3, "64": [150] * 3},
        32: {"chain": [900] * 3, "8": [990] * 3, "64": [500] * 3},
    }
    found = advice(levels, served(8))

    assert found.flags == "--speculative-ddtree-budget auto --speculative-ddtree-budgets 8,15,64"
    assert "not measured" in found.why and "64 is best at 1, 8 is best at 32" in found.why


def test_no_difference_is_claimed_within_the_spread():
    """Medians of +10 % that one round denies: the server can stay as it is, and the line says "no difference"."""
    found = advice({1: {"chain": [100] * 3, "8": [110, 112, 99], "auto": [108, 109, 98]}})

    assert found.arm == "auto" and "can stay as it is" in found.why
    assert "no difference" in "\n".join(map(plain, advice_lines(found)))


def test_a_chain_that_is_best_is_recommended_with_the_flags_that_draft_it():
    """A tree that costs more than it accepts: block size - 1 nodes and one choice a position are DFLASH's chain."""
    found = advice({1: {"chain": [100] * 3, "8": [90] * 3, "64": [60] * 3}}, served(64))

    assert found.flags == "--speculative-ddtree-budget 15 --speculative-ddtree-topk-cap 1"


def test_steps_without_a_draft_that_are_best_speak_for_auto_with_them_and_for_plain_decoding():
    """No flag of a server asks for them alone."""
    found = advice({1: {"chain": [100] * 3, "8": [90] * 3, "none": [150] * 3}}, served(8, (0, 8, 15)))

    assert found.arm == "none" and found.flags == "--speculative-ddtree-budget auto --speculative-ddtree-budgets 0,8,15"
    assert "plain decoding: without --speculative-algorithm" in found.why
    levels = {
        1: {"chain": [100] * 3, "8": [150] * 3, "none": [90] * 3},
        32: {"chain": [900] * 3, "8": [500] * 3, "none": [990] * 3},
    }
    assert str(advice(levels, served(8, (0, 8, 15))).flags).endswith("--speculative-ddtree-budgets 0,8,15")


def test_two_rounds_are_too_few_for_a_claim():
    """A spread of two values is none: no flags, with or without the chain."""
    assert advice({1: {"64": [100, 100], "8": [130, 130]}}, served(8)).flags is None
    found = advice({1: {"chain": [100, 100], "8": [130, 130]}}, served(8))

    assert found.flags is None and "too few rounds" in found.why


def test_one_budget_gives_no_advice_but_what_it_would_take():
    """The restart that makes a comparison possible."""
    found = advice({1: {"8": [100] * 3}}, served(8, (8,)))

    assert found.flags is None and "--speculative-ddtree-budgets 4,8,15,32,64" in found.why


def test_the_table_marks_the_best_arm_and_lines_its_columns_up():
    """One block for each concurrency, the chain as the base."""
    text = [plain(line) for line in table_lines(cells(samples({1: {"chain": [666.1] * 3, "8": [812.3] * 3}})))]

    assert text == [
        "  at a time  arm    tokens/s  [min, max]      accept  p50 s  p95 s  against chain",
        "          1  chain     666.1  [666.1, 666.1]    2.50    0.5      4",
        "             8 *       812.3  [812.3, 812.3]    2.50    0.5      4  +22 % [+22, +22]",
        "  * the highest median; against chain compares round by round, so that another arm may gain more there",
    ]
    alone = [plain(line) for line in table_lines(cells(samples({1: {"64": [666.1] * 3, "8": [812.3] * 3}})))]
    assert alone[-1] == "  * the highest median"


def test_the_marked_arm_may_gain_less_over_the_chain_than_its_neighbour():
    """The legend is true: medians and paired rounds disagree where a whole round was slow."""
    found = cells(samples({1: {"chain": [100, 50, 200], "8": [110, 55, 150], "64": [112, 40, 210]}}))
    marked = max(found, key=lambda cell: cell.tokens_per_s.median)
    gains = {cell.arm: gain.ratio.median for cell in found if (gain := against_chain(cell, found))}

    assert marked.arm == "64"
    assert gains == pytest.approx({"8": 1.1, "64": 1.05})
