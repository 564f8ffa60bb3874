# SPDX-License-Identifier: Apache-2.0
"""DDTREE in the real engine: published SGLangs, patched by the product, decoding on a CPU in float32."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


BUDGETS = (1, 3, 7, 16, 63)
#: Without calibration, which follows what each budget's own trees showed.
NESTED = (1, 3, 7, 63)
#: The first tokens of `CALLS`: real kernels take fifty times as long.
BRIEF = [call | {"sampling_params": call["sampling_params"] | {"max_new_tokens": 14}} for call in CALLS]

#: One piece of the overlay broken on purpose: file, what it holds, what it holds instead.
BREAKS = {
    "mask": (
        "tree_mask.py",
        "rows[:, prefix_len:] = ancestors",
        "rows[:, prefix_len:] = torch.ones_like(ancestors).tril()",
    ),
    "positions": (
        "tree_reference.py",
        "prefix_lens.to(torch.int64).unsqueeze(1) + depths",
        "prefix_lens.to(torch.int64).unsqueeze(1) + torch.arange(depths.shape[1])",
    ),
    # DFLASH's rule: the first rows instead of the path's.
    "commit": ("placing.py", "nodes = acceptance.path[request, :count]", "nodes = torch.arange(count)"),
}


def queue(engines: Engines, sites: Sites) -> None:
    """One release in all compositions, the others in some."""
    here = Release(engines, sites, harness.RELEASE, ahead=False)
    here.ddtree("triton", 16, BRIEF, environment=harness.TRITON)
    flows = [{"flow": flow} for flow in FLOWS.values()]
    here.plain("plain", [*CALLS, *map(harness.alone, [*FLOWS.values(), TIGHT])])
    here.dflash("dflash", CALLS)
    for budget in BUDGETS:
        calibration = "off" if budget in NESTED else "auto"
        here.ddtree(
            f"budget-{budget}", budget, [*CALLS, *flows], traced=True, speculative_ddtree_calibration=calibration
        )
    chain = harness.BLOCK_SIZE - 1
    here.ddtree("chain", chain, CALLS, traced=True, speculative_ddtree_topk_cap=1)
    here.ddtree("chain-seed", chain, CALLS, traced=True, speculative_ddtree_chain_seed=True)
    here.ddtree("float16", 16, CALLS, dtype="float16")
    here.ddtree("tight", 24, [{"flow": TIGHT}], max_total_tokens=640, chunked_prefill_size=48)
    here.plain("plain counted", [harness.alone(TIGHT_PENALISED), harness.alone(SWITCHING)], max_total_tokens=4096)
    here.ddtree("tight counted", 24, [{"flow": TIGHT_PENALISED}], max_total_tokens=340, chunked_prefill_size=48)
    for name, break_ in BREAKS.items():
        here.ddtree(f"broken-{name}", 16, CALLS, site=broken(here.site, engines.folder / f"site-{name}", *break_))
    for version in harness.FIRST_WORKER[1:]:
        other = Release(engines, sites, version, ahead=False)
        if version == harness.FIRST_WORKER[-1]:  # it has another Triton backend
            other.ddtree("triton-newest", 7, BRIEF, environment=harness.TRITON)
        calls = [*CALLS, *({"flow": wishing(FLOWS[name])} for name in RELEASE_FLOWS), {"flow": SWITCHING}]
        other.ddtree(version, 7, calls, speculative_ddtree_budgets=LANES)


def broken(site: Callable[[], Path], copy: Path, path: str, before: str, after: str) -> Callable[[], Path]:
    """What makes a copy of a site with one piece broken."""
    return lambda: harness.broken_site(site(), copy, path, before, after)


def outputs(result: dict[str, Any]) -> list[list[list[int]]]:
    """Output ids of the batches that every engine decodes."""
    return [call["output_ids"] for call in result["calls"][: len(CALLS)]]


def accept_length(result: dict[str, Any]) -> float:
    """Tokens per verify step over all requests of those batches."""
    calls = result["calls"][: len(CALLS)]
    spec = [(s, ids) for call in calls for s, ids in zip(call["spec"], call["output_ids"], strict=True)]
    return sum(len(ids) for _, ids in spec) / sum(s["spec_verify_ct"] for s, _ in spec)


def plain_flow(engines: Engines, name: str) -> dict[str, Any]:
    """Plain decoding of the requests of a flow."""
    return engines["plain"]["calls"][len(CALLS) + list(FLOWS).index(name)]


@pytest.mark.parametrize("budget", BUDGETS)
def test_greedy_output_equals_plain_decoding(engines: Engines, budget: int) -> None:
    """Token for token, for one prompt and for three of different lengths together."""
    assert outputs(engines[f"budget-{budget}"]) == outputs(engines["plain"])


@pytest.mark.parametrize("name", FLOWS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_every_composition_equals_plain_decoding(engines: Engines, budget: int, name: str) -> None:
    """Whatever joins, leaves, is aborted, cut, penalised or sampled beside it, a greedy request gets plain tokens."""
    got = engines[f"budget-{budget}"]["calls"][len(CALLS) + list(FLOWS).index(name)]
    assert problems(FLOWS[name], got, plain_flow(engines, name)) == []


def test_flows_do_what_their_names_say(engines: Engines) -> None:
    """Requests do stop, are aborted and are cut at a limit, so the equalities above say something."""
    result = engines["budget-16"]
    ends = dict(zip(FLOWS, (call["finish"] for call in result["calls"][len(CALLS) :]), strict=True))
    for name in ("stop tokens inside a path", "stop strings inside a path"):
        assert "stop" in [end["type"] for end in ends[name]], name
    assert "abort" in [end["type"] for end in ends["aborted in the middle"]]
    calls = dict(zip(FLOWS, result["calls"][len(CALLS) :], strict=True))
    cut = {step["rid"] for step in engines.trace("budget-16") if step["committed"] < len(step["path"])}
    for name in ("stop tokens inside a path", "stop strings inside a path", "token limits inside a path"):
        assert cut & set(calls[name]["rids"]), name
    *_, early, _, late = (len(ids) for ids in calls["penalised among others"]["output_ids"])
    assert len(calls["stop tokens inside a path"]["output_ids"][1]) < 6 <= early < 24  # one prompt, the same stops
    assert late == 6
    cached = [int(count) for count in re.findall(r"#cached-token: (\d+)", result["log"])]
    assert max(cached) >= 200


def test_seeded_trees_hold_the_whole_chain_and_equal_plain_decoding(engines: Engines) -> None:
    """With the budget of a chain and a chain seed every tree is DFLASH's block: the same tokens, as many accepted."""
    assert outputs(engines["chain-seed"]) == outputs(engines["plain"])
    assert accept_length(engines["chain-seed"]) == accept_length(engines["dflash"])
    trees, chains = engines.steps("chain-seed"), engines.steps("dflash")
    assert [[t["tokens"] for t in steps] for steps in trees] == [[c["tokens"] for c in steps] for steps in chains]


def test_float16_accepts_what_float32_accepts(engines: Engines) -> None:
    """The drafter is fed its own dtype: SGLang's cast to bfloat16 neither ends the first step nor costs acceptance."""
    assert accept_length(engines["float16"]) == pytest.approx(accept_length(engines["budget-16"]), rel=0.1)


def test_retracted_requests_and_prefill_in_pieces_equal_plain_decoding(engines: Engines) -> None:
    """A request that loses its KV in mid-generation is decoded again to the same text; no slot is lost."""
    result = engines["tight"]
    assert "Retract requests" in result["log"]
    assert "#new-token: 48," in result["log"]
    assert problems(TIGHT, result["calls"][0], engines["plain"]["calls"][-1]) == []


def test_penalties_go_on_where_a_retracted_request_was(engines: Engines) -> None:
    """What it said before it lost its KV is penalised still, and not asked of it a second time by `min_new_tokens`."""
    assert "Retract requests" in engines["tight counted"]["log"]
    assert problems(TIGHT_PENALISED, engines["tight counted"]["calls"][0], engines["plain counted"]["calls"][0]) == []


@pytest.mark.parametrize("name", ["triton", "triton-newest"])
def test_real_kernels_equal_plain_decoding(engines: Engines, name: str) -> None:
    """SGLang's own Triton kernels, in the interpreter, and the reference in their place give the same tokens."""
    plain = [[ids[:14] for ids in batch] for batch in outputs(engines["plain"])]
    assert outputs(engines[name]) == plain
    assert accept_length(engines[name]) > 2


@pytest.mark.parametrize("version", harness.FIRST_WORKER[1:])
def test_every_release_equals_plain_decoding(engines: Engines, version: str) -> None:
    """The same tokens in each release, with requests that join, stop and are penalised."""
    result = engines[version]
    assert result["server_info"]["version"] == version
    assert outputs(result) == outputs(engines["plain"])
    assert accept_length(result) > 2
    *flows, switching = result["calls"][len(CALLS) :]
    for name, got in zip(RELEASE_FLOWS, flows, strict=True):
        assert problems(FLOWS[name], got, plain_flow(engines, name)) == [], name
    # Steps that draft nothing in a batch that others have just joined or left.
    assert problems(SWITCHING, switching, engines["plain counted"]["calls"][1]) == []
    assert result["server_info"]["ddtree_steps"]["none"] >= 20


def test_dflash_still_equals_plain_decoding(engines: Engines) -> None:
    """The patched tree leaves DFLASH as it was."""
    assert outputs(engines["dflash"]) == outputs(engines["plain"])


def test_tree_accepts_more_than_the_chain(engines: Engines) -> None:
    """At a budget of 16 the accept length exceeds DFLASH's on the same prompts."""
    assert accept_length(engines["budget-16"]) > accept_length(engines["dflash"])


def test_a_smaller_budget_drafts_the_first_nodes_of_a_larger_one(engines: Engines) -> None:
    """What is drafted behind a text depends on the block alone: the drafter never sees the budget (ddtree b-sweep)."""
    trees = [
        {(step["tokens"][0], step["prefix_len"], at): step for at, step in enumerate(engines.trace(f"budget-{b}")[:3])}
        for b in NESTED
    ]
    for budget, small, large in zip(NESTED, trees, trees[1:], strict=False):
        for place in small.keys() & large.keys():
            assert large[place]["tokens"][: budget + 1] == small[place]["tokens"], place
            assert large[place]["parents"][: budget + 1] == small[place]["parents"], place
        assert small.keys() & large.keys()


def test_branches_off_the_drafters_first_choice_are_accepted(engines: Engines) -> None:
    """Some accepted path holds a node that is not the drafter's first choice: the tree earns its width."""
    steps = engines.trace("budget-16")
    assert sum(any(step["ranks"][node] > 0 for node in step["path"][1:]) for step in steps) >= 3


def test_one_choice_a_position_drafts_what_dflash_drafts(engines: Engines) -> None:
    """With top-k 1 every verify step holds DFLASH's own block, token for token, and accepts as much of it."""
    trees, chains = (
        [[(step["prefix_len"], step["tokens"]) for step in steps] for steps in engines.steps(name)]
        for name in ("chain", "dflash")
    )
    assert all(trees)
    assert trees == chains
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
    assert "DDTREE ready. block size 8 (7 draft positions), budget 16 of 16, " in result["log"]
    for call in result["calls"][: len(CALLS)]:
        for spec, ids in zip(call["spec"], call["output_ids"], strict=True):
            assert spec["spec_algorithm"] == "DDTREE"
            assert spec["spec_ddtree_budget"] == 16
            assert spec["spec_accept_length"] == pytest.approx(len(ids) / spec["spec_verify_ct"])
            assert spec["spec_proposed_drafts"] == 16 * spec["spec_verify_ct"]
            accepted = [n for n, count in enumerate(spec["spec_accept_histogram"]) for _ in range(count)]
            assert statistics.mean(accepted) == pytest.approx(spec["spec_accepted_drafts"] / spec["spec_verify_ct"])
