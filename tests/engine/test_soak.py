# SPDX-License-Identifier: Apache-2.0
"""A fixed sample of the random traffic that `make soak` draws."""

from __future__ import annotations

import functools

import pytest
from tests.engine import harness
from tests.engine.engines import Engines, Sites
from tests.engine.soak import draw_group, run_group


SEEDS = (1, 2)


def queue(engines: Engines, sites: Sites) -> None:
    """A group a seed."""
    target = harness.text_target(engines.folder / "target")

    def run(seed: int) -> list[str]:
        found, _ = run_group(sites[harness.RELEASE], target, draw_group(seed, 12), engines.folder)
        return found

    for seed in SEEDS:
        engines.submit(str(seed), functools.partial(run, seed), release=harness.RELEASE)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_traffic_equals_plain_decoding(engines: Engines, seed: int) -> None:
    """Requests that join, leave, are aborted, retracted, cut, penalised or drawn: each greedy one gets plain tokens."""
    found = engines[str(seed)]

    assert found == []


def test_a_seed_gives_the_same_traffic() -> None:
    """What a failure prints repeats it."""
    assert draw_group(7, 5) == draw_group(7, 5)
    assert draw_group(7, 5) != draw_group(8, 5)
