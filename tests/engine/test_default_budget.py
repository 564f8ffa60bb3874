# SPDX-License-Identifier: Apache-2.0
"""Engines that were given no budget serve `auto`; what they serve where it cannot be: `test_start_up`."""

from __future__ import annotations

from typing import Any

import pytest
from tests.engine import harness
from tests.engine.engines import Engines, Release, Sites

from ddtree_overlay.patching import SUPPORTED_RELEASES


#: Each generation, and the newest, in which `ServerArgs` stays as it was written.
RELEASES = (harness.RELEASE, harness.SECOND_RELEASE, SUPPORTED_RELEASES[-1])
DEFAULT = [0, 2, 4, 7, 15, 24, 31, 63]
TOLD = "no --speculative-ddtree-budget was given"


def call(**params: Any) -> dict[str, Any]:
    """Three requests."""
    return harness.greedy(harness.prompts(0, 1, 3), 24, **params)


CALLS = [call(), call(custom_params={"ddtree_budget": 4})]


def queue(engines: Engines, sites: Sites) -> None:
    """Plain decoding; and in each release nothing, and a list."""
    engines.start("plain", sites[harness.RELEASE], harness.engine_args(None), [call()])
    for version in RELEASES:
        here = Release(engines, sites, version, ahead=version in harness.SECOND_WORKER)
        args = harness.engine_args(
            "DDTREE", disable_overlap_schedule=version not in harness.SECOND_WORKER, max_total_tokens=4096
        )
        here.start(f"nothing {version}", args, CALLS)
        here.start(f"list {version}", args | {"speculative_ddtree_budgets": "4,16"}, CALLS)


@pytest.mark.parametrize("version", RELEASES)
def test_an_engine_without_a_budget_serves_auto(engines: Engines, version: str) -> None:
    """The server, its requests and its log name `auto` and the lanes, and what is decoded is plain decoding's text."""
    found = engines[f"nothing {version}"]

    assert [one["output_ids"] for one in found["calls"]] == [engines["plain"]["calls"][0]["output_ids"]] * len(CALLS)
    info = found["server_info"]
    assert (info["speculative_ddtree_budget"], info["speculative_ddtree_budgets"]) == ("auto", DEFAULT)
    assert info["speculative_num_draft_tokens"] == 64
    spec = found["calls"][0]["spec"][0]
    assert (spec["spec_ddtree_budget"], spec["spec_ddtree_budgets"]) == ("auto", DEFAULT)
    assert f"budget auto of {', '.join(map(str, DEFAULT))}" in found["log"]
    assert TOLD not in found["log"]


@pytest.mark.parametrize("version", RELEASES)
def test_a_list_alone_is_what_auto_chooses_among(engines: Engines, version: str) -> None:
    """And what a request may ask for."""
    found = engines[f"list {version}"]

    assert [one["output_ids"] for one in found["calls"]] == [engines["plain"]["calls"][0]["output_ids"]] * len(CALLS)
    info = found["server_info"]
    assert (info["speculative_ddtree_budget"], info["speculative_ddtree_budgets"]) == ("auto", [4, 16])
    assert info["ddtree_steps"]["4"] > 0 and TOLD not in found["log"]
