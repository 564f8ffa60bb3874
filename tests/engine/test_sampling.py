# SPDX-License-Identifier: Apache-2.0
"""Sampled requests in the real engine have the target's own distribution, place by place.

The level is `sampled.LEVEL`. What it still sees is tested too: a rule that takes the first draft in 15 of 100
draws is found in every case but one. `scripts/mutate` breaks the sampler itself.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tests.engine import harness, sampled
from tests.engine.engines import Engines, Release, Sites


RUNS = [(budget, case) for budget, cases in sampled.SERVED.items() for case in cases]
#: Of blanks, which are drafted, a right draw takes nearly as many as a biased one.
SEEN = [(budget, case) for budget, case in RUNS if case != "penalised blanks"]


def queue(engines: Engines, sites: Sites) -> None:
    """An engine a budget, and plain decoding of the greedy requests."""
    here = Release(engines, sites, harness.RELEASE, ahead=False)
    for budget in sorted(sampled.SERVED, reverse=True):  # the longest first
        name = f"budget-{budget}"
        trace = engines.trace_file(name)
        here.start(name, sampled.arguments(budget), sampled.calls(budget), SGLANG_DDTREE_TRACE=trace)
    here.start(
        "plain", harness.engine_args(None), [harness.greedy([prompt], 24) for prompt in sampled.PROMPTS.values()]
    )


class Judged(dict[int, dict[str, dict[str, Any]]]):
    """What is known of an engine's outputs, computed when it is asked for."""

    def __init__(self, engines: Engines) -> None:
        super().__init__()
        self._engines = engines

    def __missing__(self, budget: int) -> dict[str, dict[str, Any]]:
        name = f"budget-{budget}"
        folder = self._engines.folder / name / "judged"
        self[budget] = sampled.judge(budget, self._engines[name], self._engines.trace(name), folder)
        return self[budget]


@pytest.fixture(scope="module")
def judged(engines: Engines) -> Judged:
    """The chi-squares of each budget and case."""
    return Judged(engines)


@pytest.mark.parametrize(("budget", "case"), RUNS)
def test_every_place_has_the_targets_distribution(judged: Judged, budget: int, case: str) -> None:
    """Second to fifth token, drafted or not, after every prefix (hipfire#483, sglang#29907)."""
    assert sampled.faults(judged[budget][case]) == []


@pytest.mark.parametrize(("budget", "case"), SEEN)
def test_a_bias_towards_the_draft_would_be_seen(judged: Judged, budget: int, case: str) -> None:
    """Fifteen of 100 draws replaced by the drafter's first choice fail the test above, in every case but one."""
    assert min(judged[budget][case]["replaced"].values()) < sampled.LEVEL


def test_drafts_cover_all_some_and_none_of_the_support(judged: Judged) -> None:
    """At the budget of 16, at two places or more each, so that the distributions above speak of all three."""
    places: dict[str, set[int]] = {}
    draws: Counter[str] = Counter()
    for result in judged[16].values():
        for cell in result["cells"]:
            if cell["freedom"]:
                places.setdefault(cell["covered"], set()).add(cell["place"])
                draws[cell["covered"]] += cell["draws"]
    for covered in ("all", "some", "none", "leaf"):
        assert len(places[covered]) >= 2, places
        assert draws[covered] >= 100, draws


@pytest.mark.parametrize("case", ["penalised", "penalised blanks"])
def test_penalised_requests_are_judged_at_the_root(judged: Judged, case: str) -> None:
    """Each of their tokens is drawn at the root of a tree of its own: a path inside the tree is never followed."""
    kinds = {cell["covered"] for cell in judged[16][case]["cells"]}
    assert "leaf" not in kinds


@pytest.mark.parametrize("budget", sampled.SERVED)
def test_greedy_requests_among_sampled_ones_equal_plain_decoding(engines: Engines, budget: int) -> None:
    """Token for token, in batches of up to 128 requests that draw."""
    plain = dict(zip(sampled.PROMPTS, (call["output_ids"][0] for call in engines["plain"]["calls"]), strict=True))
    for name, call in zip(sampled.SERVED[budget], engines[f"budget-{budget}"]["calls"], strict=True):
        greedy = [ids for at, ids in enumerate(call["output_ids"]) if sampled.is_greedy(at)]
        assert greedy == [plain[name]] * len(greedy)
        assert greedy
