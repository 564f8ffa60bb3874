# SPDX-License-Identifier: Apache-2.0
"""Pages of 16 and 64 slots, the radix cache, float8 KV and retraction in the real engine."""

from __future__ import annotations

from typing import Any

import pytest
from tests.engine import harness
from tests.engine.engines import Engines, Release, Sites
from tests.engine.scenarios import THREE


#: A turn, a second one behind it, and texts of which a small pool never holds as many as are let in, in whatever order
#: they come.
TURNS = [
    harness.greedy(THREE, 24),
    harness.greedy([[10, 100, 101]] * 3, 8) | {"behind": 0},
    harness.greedy([prompt[::-1] for prompt in harness.prompts(*range(8))], 48),
]

#: Values of a token's K or V in one layer of the tiny pair.
HEAD_DIM = 32


def queue(engines: Engines, sites: Sites) -> None:
    """A fresh prefill to compare with, small pages in a small pool, large pages with float8 KV."""
    here = Release(engines, sites, harness.RELEASE, ahead=False)

    def start(name: str, args: dict[str, Any], calls: list[dict[str, Any]]) -> None:
        kv = str(engines.folder / name / "kv.jsonl")
        here.start(name, args, calls, DDTREE_TEST_KV_TRACE=kv, SGLANG_DDTREE_TRACE=engines.trace_file(name))

    def ddtree(**extra: Any) -> dict[str, Any]:
        return harness.engine_args("DDTREE", speculative_ddtree_budget=16, **extra)

    start("plain-pages", harness.engine_args(None, disable_radix_cache=True), TURNS)
    start("pages-16", ddtree(page_size=16, max_total_tokens=272), TURNS)
    float8 = ddtree(page_size=64, kv_cache_dtype="fp8_e5m2")
    start("pages-64-float8", float8, [harness.greedy(THREE[1:2], 24)])


def reference(engines: Engines, text: list[int]) -> list[list[float]]:
    """The KV of each token of a text, as a fresh prefill computed it; each layer's K and V behind one another."""
    shared = [(common(text, record["text"]), record["kv"]) for record in engines.kv("plain-pages")]
    length, values = max(shared, key=lambda pair: pair[0])
    assert length >= min(len(text), 30)
    return values[:length]


def common(one: list[int], other: list[int]) -> int:
    """How many tokens two texts share from the start on."""
    differing = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, min(len(one), len(other)))


def test_pages_do_not_change_the_output(engines: Engines) -> None:
    """First turn, second turn from the radix cache, and a retraction: token for token what plain decoding gives."""
    ours, plain = engines["pages-16"], engines["plain-pages"]
    assert [call["output_ids"] for call in ours["calls"]] == [call["output_ids"] for call in plain["calls"]]
    assert "Retract requests" in ours["log"]
    assert any(f"#cached-token: {hit}" in ours["log"] for hit in range(16, 256))


def test_committed_kv_equals_that_of_a_fresh_prefill(engines: Engines) -> None:
    """In every layer, for every token of every request that left the engine (SubSir: re-pointed slots overwritten)."""
    records = engines.kv("pages-16")
    assert len(records) >= 9
    compared = 0
    for record in records:
        for ours, fresh in zip(record["kv"], reference(engines, record["text"]), strict=False):
            assert ours == pytest.approx(fresh, abs=1e-4)
            compared += 1
    assert compared > 400


def test_float8_kv_lies_where_its_token_lies(engines: Engines) -> None:
    """What the first layer keeps of a token depends on token and position alone: it is the rounded float32 value.

    Deeper layers differ by more than rounding, without speculation too: tokens of one forward pass see each other
    before they are rounded, later ones see the rounded values.
    """
    compared = 0
    for record in engines.kv("pages-64-float8"):
        for ours, exact in zip(record["kv"], reference(engines, record["text"]), strict=False):
            assert all(near_float8(a, b) for a, b in zip(ours[: 2 * HEAD_DIM], exact[: 2 * HEAD_DIM], strict=True))
            compared += 1
    assert compared > 60


def near_float8(rounded: float, exact: float) -> bool:
    """Whether a value may be the e5m2 rounding of another: two bits behind the leading one, an eighth at most."""
    return abs(rounded - exact) <= abs(exact) / 8 + 2**-16


def test_float8_accepts_branches(engines: Engines) -> None:
    """Some path of the float8 engine has moved KV, so the comparison above says something."""
    steps: list[dict[str, Any]] = engines.trace("pages-64-float8")
    assert any(node != place for step in steps for place, node in enumerate(step["path"]))
