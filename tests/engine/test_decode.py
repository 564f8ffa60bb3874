# SPDX-License-Identifier: Apache-2.0
"""DDTREE in the real engine: a published SGLang 0.5.11, patched by the product, decoding on a CPU in float32."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
from tests.engine.conftest import BREAKS, BUDGETS, SCENARIOS, Engines


def outputs(result: dict[str, Any]) -> list[list[list[int]]]:
    """Output ids of every call."""
    return [call["output_ids"] for call in result["calls"]]


def accept_length(result: dict[str, Any]) -> float:
    """Tokens per verify step over all requests of all calls."""
    spec = [(s, ids) for call in result["calls"] for s, ids in zip(call["spec"], call["output_ids"], strict=True)]
    return sum(len(ids) for _, ids in spec) / sum(s["spec_verify_ct"] for s, _ in spec)


@pytest.mark.parametrize("budget", BUDGETS)
def test_greedy_output_equals_plain_decoding(engines: Engines, budget: int) -> None:
    """Token for token, for one prompt and for three of different lengths together."""
    assert outputs(engines[f"budget-{budget}"]) == outputs(engines["plain"])


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_requests_that_cut_or_change_a_path_equal_plain_decoding(engines: Engines, scenario: str) -> None:
    """Penalties, bias, stops, the token limit and the end of the context: token for token."""
    at = list(SCENARIOS).index(scenario)
    ours, plain = engines["scenarios"]["calls"][at], engines["plain-scenarios"]["calls"][at]
    assert ours["output_ids"] == plain["output_ids"]
    assert [f["type"] for f in ours["finish"]] == [f["type"] for f in plain["finish"]]


def test_stop_scenario_does_stop(engines: Engines) -> None:
    """Some request of the stop scenario ends by its stop token, so the equality above says something."""
    call = engines["plain-scenarios"]["calls"][list(SCENARIOS).index("stop token inside a path")]
    assert "stop" in [finish["type"] for finish in call["finish"]]


def test_retracted_request_equals_plain_decoding(engines: Engines) -> None:
    """A request that loses its KV in mid-generation is decoded again to the same text; no slot is lost."""
    result = engines["retraction"]
    assert "Retract requests" in result["log"]
    assert outputs(result)[0] == outputs(engines["plain-scenarios"])[-1]


def test_dflash_still_equals_plain_decoding(engines: Engines) -> None:
    """The patched tree leaves DFLASH as it was."""
    assert outputs(engines["dflash"]) == outputs(engines["plain"])


def test_tree_accepts_more_than_the_chain(engines: Engines) -> None:
    """At a budget of 16 the accept length exceeds DFLASH's on the same prompts."""
    assert accept_length(engines["budget-16"]) > accept_length(engines["dflash"])


def test_branches_off_the_drafters_first_choice_are_accepted(engines: Engines) -> None:
    """Some accepted path holds a node that is not the drafter's first choice: the tree earns its width."""
    steps = engines.trace("budget-16")
    assert sum(any(step["ranks"][node] > 0 for node in step["path"][1:]) for step in steps) >= 3


def test_one_choice_a_position_drafts_what_dflash_drafts(engines: Engines) -> None:
    """With top-k 1 every verify step holds DFLASH's own block, token for token, and accepts as much of it."""
    trees, chains = engines.trace("chain"), engines.trace("dflash")
    assert [(t["prefix_len"], t["tokens"]) for t in trees] == [(c["prefix_len"], c["tokens"]) for c in chains]
    assert outputs(engines["chain"]) == outputs(engines["plain"])
    assert accept_length(engines["chain"]) == accept_length(engines["dflash"])


@pytest.mark.parametrize("piece", BREAKS)
def test_breaking_a_piece_is_noticed(engines: Engines, piece: str) -> None:
    """With the mask, the positions or the commit broken the output differs: the equality above can fail."""
    assert outputs(engines[f"broken-{piece}"]) != outputs(engines["plain"])


def test_trace_is_consistent_with_the_outputs(engines: Engines) -> None:
    """Each step's accepted path and bonus are the tokens that the request got at that place."""
    result = engines["budget-16"]
    texts = {rid: ids for call in result["calls"] for rid, ids in zip(call["rids"], call["output_ids"], strict=True)}
    first_prefix: dict[str, int] = {}
    for step in engines.trace("budget-16"):
        at = step["prefix_len"] - first_prefix.setdefault(step["rid"], step["prefix_len"]) + 1
        tokens = [*(step["tokens"][node] for node in step["path"][1:]), step["bonus"]][: step["committed"]]
        assert texts[step["rid"]][at : at + len(tokens)] == tokens


def test_server_and_requests_tell_the_truth(engines: Engines) -> None:
    """Server info, log and meta_info name DDTREE, its budget and both widths; the accept length is tokens per step."""
    result = engines["budget-16"]
    info = result["server_info"]
    assert info["speculative_algorithm"] == "DDTREE"
    assert info["speculative_ddtree_budget"] == 16
    assert info["speculative_num_draft_tokens"] == 17
    assert info["speculative_dflash_block_size"] == 8
    assert "DDTREE ready. block size 8 (7 draft positions), budget 16 (verify width 17)" in result["log"]
    for call in result["calls"]:
        for spec, ids in zip(call["spec"], call["output_ids"], strict=True):
            assert spec["spec_algorithm"] == "DDTREE"
            assert spec["spec_ddtree_budget"] == 16
            assert spec["spec_accept_length"] == pytest.approx(len(ids) / spec["spec_verify_ct"])
            assert spec["spec_proposed_drafts"] == 16 * spec["spec_verify_ct"]
            accepted = [n for n, count in enumerate(spec["spec_accept_histogram"]) for _ in range(count)]
            assert statistics.mean(accepted) == pytest.approx(spec["spec_accepted_drafts"] / spec["spec_verify_ct"])
