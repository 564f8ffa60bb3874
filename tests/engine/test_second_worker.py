# SPDX-License-Identifier: Apache-2.0
"""The second generation of DFLASH workers in the real engine, with overlap scheduling: SGLang 0.5.14 and later."""

from __future__ import annotations

import pytest
from tests.engine import harness
from tests.engine.engines import Engines, Release, Sites
from tests.engine.scenarios import (
    CALLS,
    FLOWS,
    LANES,
    RELEASE_FLOWS,
    SWITCHING,
    TIGHT,
    TIGHT_PENALISED,
    problems,
    wishing,
)
from tests.engine.test_decode import accept_length, outputs


BUDGETS = (3, 16, 63)
#: SGLang admits grammars with DFLASH from 0.5.17 on, where they need a GPU.
GRAMMAR_RELEASE = "0.5.18"
#: Requests that a grammar constrains, one that nothing does between them.
CONSTRAINED = {
    "input_ids": harness.prompts(0, 1, 3),
    "sampling_params": [
        {"temperature": 0, "max_new_tokens": 24, "regex": r"(self|other)\.[a-z_]+\([a-z, ]*\)\n"},
        {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True},
        {"temperature": 0, "max_new_tokens": 24, "regex": "[a-z]{3,8}( [a-z]{2,8}){3}[.]"},
    ],
}
#: Requests that ask for the two best tokens of every position. SGLang admits them with DFLASH from 0.5.18 on.
LOGPROBS = harness.greedy(harness.prompts(0, 1, 3), 24) | {"tops": 2}
OTHERS = [version for version in harness.SECOND_WORKER if version != harness.SECOND_RELEASE]


def has_logprobs(version: str) -> bool:
    """Whether a release reports log-probabilities with DFLASH."""
    return int(version.split(".")[2]) >= 18


def queue(engines: Engines, sites: Sites) -> None:
    """One release in all compositions, the others in some."""
    here = Release(engines, sites, harness.SECOND_RELEASE, ahead=True)
    flows = [{"flow": flow} for flow in FLOWS.values()]
    here.plain("plain", [*CALLS, *map(harness.alone, [*FLOWS.values(), SWITCHING, TIGHT]), LOGPROBS])
    here.plain("plain counted", [harness.alone(TIGHT_PENALISED)], max_total_tokens=4096)
    here.dflash("dflash", CALLS)
    for budget in BUDGETS:
        here.ddtree(f"budget-{budget}", budget, [*CALLS, *flows], traced=True)
    # One engine is started as SGLang does it.
    chain = harness.BLOCK_SIZE - 1
    here.ddtree("chain", chain, CALLS, traced=True, cold=True, speculative_ddtree_topk_cap=1)
    here.ddtree("one after the other", 16, [*CALLS, *flows], disable_overlap_schedule=True)
    here.ddtree("pages", 16, [*CALLS, *flows], page_size=16)
    here.ddtree("tight", 24, [{"flow": TIGHT}], max_total_tokens=576, chunked_prefill_size=48)
    here.ddtree("tight counted", 24, [{"flow": TIGHT_PENALISED}], max_total_tokens=340, chunked_prefill_size=48)
    here.ddtree("small pool", 24, CALLS, max_total_tokens=480)
    for version in OTHERS:
        other = Release(engines, sites, version, ahead=True)
        calls = [*CALLS, *({"flow": wishing(FLOWS[name])} for name in RELEASE_FLOWS), {"flow": SWITCHING}]
        calls += [LOGPROBS] if has_logprobs(version) else []
        other.ddtree(version, 7, calls, traced=True, speculative_ddtree_budgets=LANES)
        if version == GRAMMAR_RELEASE:
            other.plain("plain constrained", [CONSTRAINED], grammar_backend="xgrammar")
            other.ddtree("constrained", 16, [CONSTRAINED], grammar_backend="xgrammar")


@pytest.mark.parametrize("name", FLOWS)
@pytest.mark.parametrize("engine", [*(f"budget-{budget}" for budget in BUDGETS), "one after the other", "pages"])
def test_every_composition_equals_plain_decoding(engines: Engines, engine: str, name: str) -> None:
    """Scheduled ahead or not, with trees narrower and wider than the block, in pages: the plain tokens."""
    at = len(CALLS) + list(FLOWS).index(name)
    assert outputs(engines[engine]) == outputs(engines["plain"])
    assert problems(FLOWS[name], engines[engine]["calls"][at], engines["plain"]["calls"][at]) == []


def test_retracted_requests_and_prefill_in_pieces_equal_plain_decoding(engines: Engines) -> None:
    """A request that loses its KV while a step of it is in flight is decoded again to the same text."""
    assert "Retract requests" in engines["tight"]["log"]
    assert problems(TIGHT, engines["tight"]["calls"][0], engines["plain"]["calls"][-2]) == []


def test_penalties_go_on_where_a_retracted_request_was(engines: Engines) -> None:
    """What it said before it lost its KV is penalised still, and not asked of it a second time by `min_new_tokens`."""
    assert "Retract requests" in engines["tight counted"]["log"]
    assert problems(TIGHT_PENALISED, engines["tight counted"]["calls"][0], engines["plain counted"]["calls"][0]) == []


def test_a_request_holds_a_block_and_the_widest_tree_beside_its_tokens(engines: Engines) -> None:
    """Not two trees: the step in flight commits a block at most. 8 + 25 slots of 480, in two even halves."""
    assert "requests are limited to 446 tokens; 34 of 480 slots" in engines["small pool"]["log"]
    assert outputs(engines["small pool"]) == outputs(engines["plain"])


def test_grammars_constrain_every_node(engines: Engines) -> None:
    """A constrained request ends where plain decoding's does, beside one that is free."""
    ours, plain = (engines[name]["calls"][0] for name in ("constrained", "plain constrained"))
    assert ours["output_ids"] == plain["output_ids"]
    assert [end["type"] for end in ours["finish"]] == ["stop", "length", "stop"]


def test_one_choice_a_position_drafts_and_accepts_what_dflash_does(engines: Engines) -> None:
    """With top-k 1 every verify step holds DFLASH's own block, and the texts are the same.

    Whether a request is still in the step that runs ahead of its end depends on who has come meanwhile.
    """
    for trees, chains in zip(engines.steps("chain"), engines.steps("dflash"), strict=True):
        both = min(len(trees), len(chains))
        assert both > 2
        assert max(len(trees), len(chains)) <= both + 1
        for tree, chain in zip(trees[:both], chains[:both], strict=True):
            assert (tree["prefix_len"], tree["tokens"]) == (chain["prefix_len"], chain["tokens"])
    assert outputs(engines["chain"]) == outputs(engines["dflash"]) == outputs(engines["plain"])
    assert accept_length(engines["chain"]) == accept_length(engines["dflash"])


def test_tree_accepts_more_than_the_chain(engines: Engines) -> None:
    """At a budget of 16, by branches off the drafter's first choice."""
    assert accept_length(engines["budget-16"]) > accept_length(engines["dflash"])
    steps = engines.trace("budget-16")
    assert sum(any(step["ranks"][node] > 0 for node in step["path"][1:]) for step in steps) >= 3


@pytest.mark.parametrize("version", OTHERS)
def test_every_release_equals_plain_decoding(engines: Engines, version: str) -> None:
    """The same tokens in each release, with requests that join, stop and are penalised."""
    result = engines[version]
    assert result["server_info"]["version"] == version
    assert outputs(result) == outputs(engines["plain"])
    assert accept_length(result) > 2
    flows = result["calls"][len(CALLS) : len(CALLS) + len(RELEASE_FLOWS)]
    for name, got in zip(RELEASE_FLOWS, flows, strict=True):
        plain = engines["plain"]["calls"][len(CALLS) + list(FLOWS).index(name)]
        assert problems(FLOWS[name], got, plain) == [], name


@pytest.mark.parametrize("version", OTHERS)
def test_every_release_drafts_nothing_for_a_while(engines: Engines, version: str) -> None:
    """Before and after somebody for whom trees are verified, with results that are looked at a step late."""
    at = len(CALLS) + len(RELEASE_FLOWS)
    assert problems(SWITCHING, engines[version]["calls"][at], engines["plain"]["calls"][-3]) == []
    rids = engines[version]["calls"][at]["rids"]
    widths = [len(step["tokens"]) for step in engines.trace(version) if step["rid"] == rids[0]]
    assert set(widths) == {1, 8}
    assert widths[:10] == [1] * 10
    assert widths[-1] == 1


@pytest.mark.parametrize("version", [version for version in OTHERS if has_logprobs(version)])
def test_logprobs_equal_those_of_plain_decoding(engines: Engines, version: str) -> None:
    """The two best tokens of every position and their log-probabilities, whichever node they were read at."""
    ours, plain = (engines[name]["calls"][-1]["tops"] for name in (version, "plain"))
    for mine, theirs in zip(ours, plain, strict=True):
        assert [[token for _, token in best] for best in mine] == [[token for _, token in best] for best in theirs]
        assert [value for best in mine for value, _ in best] == pytest.approx(
            [value for best in theirs for value, _ in best], abs=1e-4
        )


def test_server_and_requests_tell_the_truth(engines: Engines) -> None:
    """Server info and meta_info name DDTREE, its budget and both widths; the accept length is tokens per step."""
    result = engines["budget-16"]
    info = result["server_info"]
    assert (info["speculative_algorithm"], info["speculative_ddtree_budget"]) == ("DDTREE", 16)
    assert (info["speculative_num_draft_tokens"], info["speculative_dflash_block_size"]) == (17, harness.BLOCK_SIZE)
    for call in result["calls"][: len(CALLS)]:
        for spec, ids in zip(call["spec"], call["output_ids"], strict=True):
            assert (spec["spec_algorithm"], spec["spec_ddtree_budget"]) == ("DDTREE", 16)
            assert spec["spec_accept_length"] == pytest.approx(len(ids) / spec["spec_verify_ct"])
