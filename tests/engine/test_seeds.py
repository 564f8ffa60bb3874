# SPDX-License-Identifier: Apache-2.0
"""Same seed, same text: seeded requests, custom logit processors and two ranks, each against plain decoding.

SGLang honours `sampling_seed` under `--enable-deterministic-inference` only: a draw then depends on seed and position.
DDTREE draws a node at its position, so a seeded text is plain decoding's own, token for token.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.engine import harness, scenarios
from tests.engine.engines import Engines, Release, Sites
from tests.engine.scenarios import BYTES, CALLS, LINE, SHORT


def seeded(prompt: list[int], seed: int, **parameters: Any) -> dict[str, Any]:
    """A request that draws with a seed."""
    return harness.request(prompt, 32, **({"temperature": 1.0, "sampling_seed": seed} | parameters))


#: Drawn without filters, one seed twice; and with filters, greedy ones among them. A filter beside a seeded request
#: makes SGLang draw another text for it, so one batch holds the one or the other.
UNFILTERED = [
    seeded(LINE, 1),
    seeded(LINE, 2),
    seeded(BYTES[3], 1, temperature=0.8),
    seeded(LINE, 1),
    seeded(BYTES[5], 3, repetition_penalty=1.2),
]
FILTERED = [
    seeded(LINE, 1, top_k=20),
    harness.request(SHORT, 32),
    seeded(SHORT, 2**40 + 7, temperature=1.3, top_p=0.9),
    harness.request(LINE, 32),
    seeded(BYTES[5], 3, top_k=8, presence_penalty=0.7),
]
SEEDED = [UNFILTERED, FILTERED]


def joining(flow: scenarios.Flow) -> scenarios.Flow:
    """The same requests one after the other, while those before still run."""
    return [{**asked, "after": [at - 1, 3 + 2 * at]} if at else asked for at, asked in enumerate(flow)]


#: A processor that reads its parameters, one that reads the request's own output, none; greedy and drawn.
PROCESSED = [
    (harness.request(LINE, 24, custom_params={"token_ids": [32, 101, 115]}), "DisallowedTokensLogitsProcessor"),
    (harness.request(SHORT, 24), None),
    (
        harness.request(BYTES[3], 24, custom_params={"ngram_size": 2, "window_size": 90}),
        "DeepseekOCRNoRepeatNGramLogitProcessor",
    ),
    (seeded(LINE, 5, top_k=30, custom_params={"token_ids": [32, 101, 115]}), "DisallowedTokensLogitsProcessor"),
    (seeded(LINE, 5, top_k=30), None),
]
PROCESSED_CALL = harness.alone([asked for asked, _ in PROCESSED]) | {"processors": [name for _, name in PROCESSED]}

#: Drawn without seeds, for two ranks whose generators differ.
DRAWN = [
    harness.request(prompt, 24, temperature=1.0, **parameters)
    for prompt in (LINE, SHORT, BYTES[3])
    for parameters in ({}, {"top_k": 20, "min_p": 0.02})
]


def queue(engines: Engines, sites: Sites) -> None:
    """Plain decoding, a tree beside it, another tree in other batches, and a tree on two ranks."""
    here = Release(engines, sites, harness.RELEASE, ahead=False)
    room = {"max_running_requests": 8, "max_total_tokens": 4096}
    fixed = room | {"enable_deterministic_inference": True, "enable_custom_logit_processor": True}
    alone = [harness.alone(flow) for flow in SEEDED]
    plain = harness.engine_args(None, **fixed | {"attention_backend": "triton"})
    here.start("plain", plain, [*alone, PROCESSED_CALL, *CALLS])
    tree = harness.engine_args("DDTREE", speculative_ddtree_budget=16, **fixed)
    here.start("tree", tree, [*alone, PROCESSED_CALL])
    other = harness.engine_args(
        "DDTREE", speculative_ddtree_budget=5, **fixed | {"max_running_requests": 3, "disable_radix_cache": True}
    )
    here.start("other", other, [{"flow": joining(flow)} for flow in SEEDED])
    ranks = harness.engine_args("DDTREE", speculative_ddtree_budget=16, tp_size=2, **room)
    trace = {"DDTREE_TEST_RANK_TRACE": str(engines.folder / "ranks" / "rank")}
    # Without the first, SGLang's own sampler lets the ranks draw a request's first token for themselves.
    two = {"SYNC_TOKEN_IDS_ACROSS_TP": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    here.start("ranks", ranks, [*CALLS, harness.alone(DRAWN)], **trace, **two)


@pytest.mark.parametrize("at", range(len(SEEDED)))
def test_seeded_text_equals_plain_decoding(engines: Engines, at: int) -> None:
    """Token for token, greedy rows among drawn ones, whatever of the tree was accepted."""
    plain, tree = engines["plain"]["calls"][at], engines["tree"]["calls"][at]
    assert tree["output_ids"] == plain["output_ids"]
    accepted = [spec["spec_accepted_drafts"] for spec in tree["spec"]]
    assert sum(count > 0 for count in accepted) >= 4, accepted


@pytest.mark.parametrize("at", range(len(SEEDED)))
def test_same_seed_gives_the_same_text(engines: Engines, at: int) -> None:
    """In another process, with another budget, and with requests that join one after the other."""
    assert engines["other"]["calls"][at]["output_ids"] == engines["tree"]["calls"][at]["output_ids"]


def test_another_seed_gives_another_text(engines: Engines) -> None:
    """Of one prompt in one batch: equal seeds, equal texts; so the equalities above say something."""
    texts = engines["tree"]["calls"][0]["output_ids"]
    assert texts[0] == texts[3]
    assert texts[0] != texts[1]


def test_custom_processors_equal_plain_decoding(engines: Engines) -> None:
    """One that is told what to forbid, one that reads what the request has got, and none: greedy and drawn."""
    plain, tree = (engines[name]["calls"][len(SEEDED)] for name in ("plain", "tree"))
    assert tree["output_ids"] == plain["output_ids"]
    forbidden = {32, 101, 115}
    assert not forbidden & {*tree["output_ids"][0], *tree["output_ids"][3]}
    assert forbidden & {*tree["output_ids"][1]}
    pairs = list(zip(tree["output_ids"][2], tree["output_ids"][2][1:], strict=False))
    assert len(set(pairs)) == len(pairs)


def test_two_ranks_equal_plain_decoding(engines: Engines) -> None:
    """Heads, vocabulary and drafter split in two: greedy texts are those of one rank."""
    got, plain = engines["ranks"]["calls"][: len(CALLS)], engines["plain"]["calls"][-len(CALLS) :]
    assert [call["output_ids"] for call in got] == [call["output_ids"] for call in plain]


def test_ranks_hold_one_tree_and_one_text(engines: Engines) -> None:
    """Each rank's generator is its own, and still trees, accepted paths and tokens are equal at every step."""
    engines["ranks"]
    first, second = (harness.read_lines(engines.folder / "ranks" / f"rank.{rank}") for rank in (0, 1))
    assert len(first) > 20
    assert first == second
