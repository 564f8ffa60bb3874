# SPDX-License-Identifier: Apache-2.0
"""The second generation of DFLASH workers in the real engine, with overlap scheduling: SGLang 0.5.14 and later."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine import harness, scenarios
from tests.engine.conftest import CALLS, RELEASE_FLOWS, TIGHT, Engines, Sites
from tests.engine.scenarios import FLOWS, problems
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


@pytest.fixture(scope="module")
def engines(sites: Sites, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """One release in all compositions, the others in some."""
    engines = Engines(tmp_path_factory.mktemp("second"))
    site = sites[harness.SECOND_RELEASE]
    room = {
        "model_path": str(harness.text_target(tmp_path_factory.mktemp("target") / "target")),
        "skip_tokenizer_init": False,
        "context_length": scenarios.CONTEXT,
        "max_total_tokens": 4096,
        "max_running_requests": 8,
    }

    def ddtree(budget: int, **extra: Any) -> dict[str, Any]:
        ahead = {"disable_overlap_schedule": False, "speculative_ddtree_budget": budget}
        return harness.engine_args("DDTREE", **ahead | room | extra)

    def start(name: str, site: Path, args: dict[str, Any], calls: list[dict[str, Any]], **environment: str) -> None:
        engines.start(name, site, args, calls, **environment)

    def trace(name: str) -> str:
        return str(engines.folder / name / "trace.jsonl")

    flows = [{"flow": flow} for flow in FLOWS.values()]
    alone = [harness.alone(flow) for flow in (*FLOWS.values(), TIGHT)]
    start("plain", site, harness.engine_args(None, **room), [*CALLS, *alone, LOGPROBS])
    dflash = harness.engine_args("DFLASH", disable_overlap_schedule=False)
    start("dflash", site, dflash, CALLS, DDTREE_TEST_CHAIN_TRACE=trace("dflash"))
    for budget in BUDGETS:
        start(f"budget-{budget}", site, ddtree(budget), [*CALLS, *flows], SGLANG_DDTREE_TRACE=trace(f"budget-{budget}"))
    xgrammar, later = {"grammar_backend": "xgrammar"}, sites[GRAMMAR_RELEASE]
    start("plain constrained", later, harness.engine_args(None, **room | xgrammar), [CONSTRAINED])
    start("constrained", later, ddtree(16, **xgrammar), [CONSTRAINED])
    chain = ddtree(harness.BLOCK_SIZE - 1, speculative_ddtree_topk_cap=1)
    start("chain", site, chain, CALLS, SGLANG_DDTREE_TRACE=trace("chain"))
    start("one after the other", site, ddtree(16, disable_overlap_schedule=True), [*CALLS, *flows])
    start("pages", site, ddtree(16, page_size=16), [*CALLS, *flows])
    start("tight", site, ddtree(24, max_total_tokens=704, chunked_prefill_size=48), [{"flow": TIGHT}])
    for version in OTHERS:
        calls = [*CALLS, *({"flow": scenarios.wishing(FLOWS[name])} for name in RELEASE_FLOWS)]
        args = ddtree(7, speculative_ddtree_budgets=scenarios.LANES)
        start(version, sites[version], args, [*calls, *([LOGPROBS] if has_logprobs(version) else [])])
    yield engines
    engines.close()


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


def test_grammars_constrain_every_node(engines: Engines) -> None:
    """A constrained request ends where plain decoding's does, beside one that is free."""
    ours, plain = (engines[name]["calls"][0] for name in ("constrained", "plain constrained"))
    assert ours["output_ids"] == plain["output_ids"]
    assert [end["type"] for end in ours["finish"]] == ["stop", "length", "stop"]


def test_one_choice_a_position_drafts_and_accepts_what_dflash_does(engines: Engines) -> None:
    """With top-k 1 every verify step holds DFLASH's own block, and the texts are the same."""
    trees, chains = engines.trace("chain"), engines.trace("dflash")
    assert [(t["prefix_len"], t["tokens"]) for t in trees] == [(c["prefix_len"], c["tokens"]) for c in chains]
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
