# SPDX-License-Identifier: Apache-2.0
"""Several verify widths in one engine: which one a step takes changes how fast it decodes, never what."""

from __future__ import annotations

from typing import Any

import pytest
from tests.engine import harness, scenarios
from tests.engine.engines import Engines, Release, Sites


LANES = "3,7,16,40"
#: A number, the chain, another number, no wish, and requests that disagree.
WISHES: tuple[Any, ...] = (3, "chain", 40, None, (3, 7, 40))
WIDTHS = {3: 4, "chain": 8, 40: 41, None: 17, (3, 7, 40): 17}
RELEASES = (harness.RELEASE, harness.SECOND_RELEASE)


def asking(wish: Any) -> dict[str, Any]:
    """Three requests that ask for a budget, or for one each."""
    wishes = wish if isinstance(wish, tuple) else (wish,) * 3
    params = [
        {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
        | ({} if one is None else {"custom_params": {"ddtree_budget": one}})
        for one in wishes
    ]
    return {"input_ids": harness.prompts(0, 1, 3), "sampling_params": params}


def queue(engines: Engines, sites: Sites) -> None:
    """Of each generation: plain decoding, and one engine with four lanes."""
    alone = [harness.alone(flow) for flow in scenarios.FLOWS.values()]
    for version in RELEASES:
        here = Release(engines, sites, version, ahead=version in harness.SECOND_WORKER)
        if version == harness.RELEASE:
            here.plain("plain", [asking(None), *alone])
        args = harness.engine_args(
            "DDTREE",
            speculative_ddtree_budget=16,
            speculative_ddtree_budgets=LANES,
            disable_overlap_schedule=version == harness.RELEASE,
        )
        auto = args | {
            "speculative_ddtree_budget": "auto",
            "speculative_ddtree_budgets": None,
            "max_total_tokens": 4096,
        }
        here.start(f"auto {version}", auto, [asking(None), asking("chain")])
        trace = engines.trace_file(version)
        here.start(version, args, [asking(wish) for wish in WISHES], SGLANG_DDTREE_TRACE=trace)
        flows = [{"flow": scenarios.wishing(flow)} for flow in scenarios.FLOWS.values()]
        paged = (
            args
            | here.room
            | {"page_size": 16, "speculative_ddtree_budget": 7, "speculative_ddtree_budgets": scenarios.LANES}
        )
        here.start(f"flows {version}", paged, flows)


@pytest.mark.parametrize("version", RELEASES)
def test_every_lane_decodes_as_plain_decoding_does(engines: Engines, version: str):
    """One run takes all lanes, one after the other and back."""
    expected = engines["plain"]["calls"][0]["output_ids"]

    found = [call["output_ids"] for call in engines[version]["calls"]]

    assert found == [expected] * len(WISHES)


@pytest.mark.parametrize("version", RELEASES)
def test_the_step_takes_the_lane_that_every_request_asks_for(engines: Engines, version: str):
    """And the configured one when they disagree or do not ask."""
    widths = [len(step["tokens"]) for step in engines.trace(version)]
    changes = [width for width, before in zip(widths, [0, *widths], strict=False) if width != before]

    assert changes[:4] == [WIDTHS[wish] for wish in WISHES[:4]]
    assert set(widths) == set(WIDTHS.values())


@pytest.mark.parametrize("name", scenarios.FLOWS)
@pytest.mark.parametrize("version", RELEASES)
def test_lanes_change_while_requests_come_and_go(engines: Engines, version: str, name: str):
    """Each asks for another width; pages of 16, stops, penalties, aborts and prefix hits among them."""
    at = list(scenarios.FLOWS).index(name)
    got, plain = engines[f"flows {version}"]["calls"][at], engines["plain"]["calls"][1 + at]

    assert scenarios.problems(scenarios.FLOWS[name], got, plain) == []


@pytest.mark.parametrize("version", RELEASES)
def test_auto_starts_with_its_lanes_and_decodes_as_plain_decoding_does(engines: Engines, version: str):
    """Nothing else is given: the lanes are the default ones, and the chain is among them."""
    found = engines[f"auto {version}"]

    assert [call["output_ids"] for call in found["calls"]] == [engines["plain"]["calls"][0]["output_ids"]] * 2
    assert found["server_info"]["speculative_ddtree_budgets"] == [0, 2, 4, 7, 15, 24, 31, 63]
    spec = found["calls"][0]["spec"][0]
    assert (spec["spec_ddtree_budget"], spec["spec_accept_rate"]) == ("auto", None)


@pytest.mark.parametrize("version", RELEASES)
def test_a_start_says_what_each_budget_costs(engines: Engines, version: str):
    """KV a request holds beside its tokens: two layers of target, one of drafter (tiny pair), in float32."""
    log = engines[version]["log"].splitlines()
    table = log[next(i for i, line in enumerate(log) if "what each budget costs" in line) + 1 :][
        : 1 + len(LANES.split(","))
    ]
    rows = [line.split() for line in table[1:]]

    assert [row[0] for row in rows] == ["3", "7", "16", "40"]
    slots = {"0.5.11": ["8", "8", "17", "41"], "0.5.17": ["50"] * 4}[version]
    assert [row[3] for row in rows] == slots
