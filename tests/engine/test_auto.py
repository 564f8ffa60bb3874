# SPDX-License-Identifier: Apache-2.0
"""Engines that choose the budget themselves: what they decode, what they try, and what they leave alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from tests.engine import harness
from tests.engine.engines import Engines, Sites


RELEASES = (harness.RELEASE, harness.SECOND_RELEASE)
LANES = "2,7,24"
TOKENS = 96


def call(**params: Any) -> dict[str, Any]:
    """Three requests, long enough for several plans."""
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True} | params
    return {"input_ids": harness.prompts(0, 1, 3), "sampling_params": [sampling] * 3}


ASKING = call(custom_params={"ddtree_budget": 24})
PLAIN = call(custom_params={"ddtree_budget": 0})
CALLS = [call(), call(), call(), ASKING, call(), PLAIN, ASKING]


def queue(engines: Engines, sites: Sites) -> None:
    """Plain decoding, and `auto` in each generation, with overlap scheduling where there is any."""
    engines.start("plain", sites[harness.RELEASE], harness.engine_args(None), [call()])
    for version in RELEASES:
        args = harness.engine_args(
            "DDTREE",
            speculative_ddtree_budget="auto",
            speculative_ddtree_budgets=f"0,{LANES}",
            disable_overlap_schedule=version == harness.RELEASE,
        )
        trace = {"SGLANG_DDTREE_TRACE": str(engines.folder / version / "trace.jsonl")}
        engines.start(version, sites[version], args, CALLS, **trace)


@pytest.mark.parametrize("version", RELEASES)
def test_whatever_is_chosen_decodes_as_plain_decoding_does(engines: Engines, version: str):
    """Plans change in the middle of texts."""
    expected = engines["plain"]["calls"][0]["output_ids"]

    found = [one["output_ids"] for one in engines[version]["calls"]]

    assert found == [expected] * len(found)
    assert len(found) == len(CALLS)


@pytest.mark.parametrize("version", RELEASES)
def test_a_start_takes_the_chains_width_and_then_others(engines: Engines, version: str):
    """On this machine wide trees cost more than they bring; which one wins is the clock's business."""
    widths = [len(step["tokens"]) for step in engines.trace(version)]

    assert widths[0] == 8
    assert set(widths) >= {8, 25}
    assert sum(one != after for one, after in itertools.pairwise(widths)) >= 2


@pytest.mark.parametrize("version", RELEASES)
def test_a_step_may_draft_nothing(engines: Engines, version: str):
    """The root alone is decoded, as plain decoding does, and the drafter knows the text afterwards."""
    steps = engines.trace(version)
    plain = [step for step in steps if len(step["tokens"]) == 1]

    assert len(plain) >= 3 * (TOKENS - 2)
    assert all(step["committed"] == 1 for step in plain)
    last = steps[-20:]
    assert {len(step["tokens"]) for step in last} == {25}
    assert sum(step["committed"] for step in last) > 1.5 * len(last)
