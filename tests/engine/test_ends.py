# SPDX-License-Identifier: Apache-2.0
"""Where a request ends within the tokens of a step: at the token at which plain decoding ends it, for its reason."""

from __future__ import annotations

from typing import Any

import pytest
from tests.engine import harness
from tests.engine.engines import Engines, Release, Sites


#: The last looks at the end of a text with every token of a step, as its predecessors do not.
RELEASES = (harness.RELEASE, harness.SECOND_RELEASE, harness.SECOND_WORKER[-1])
LIMITS = (3, 5, 12, 13, 17)
PROMPTS = harness.prompts(0, 1, 3, 5)


def asking(max_new_tokens: int = 30, stop_bytes: str = "", **params: Any) -> dict[str, Any]:
    """A greedy request that may stop at bytes."""
    stops = {"stop_token_ids": [ord(byte) for byte in stop_bytes]} if stop_bytes else {"ignore_eos": True}
    return {"temperature": 0, "max_new_tokens": max_new_tokens} | stops | params


#: What may end it, by what could be taken for its end.
ENDS = {
    "a stop token before the limit (sglang#31599)": [
        [asking(limit, byte) for byte in "e st"] for limit in LIMITS
    ],  # of every prompt at every limit some byte is the last token or one of those before it
    "the first of several stop strings": [
        [asking(stop=stops)] * 4 for stops in (["e", "t", "s"], ["the", "t", "se", "e"], ["\n", "e\n", "ee"])
    ],
    "a stop token before a stop string": [
        [asking(stop_bytes=byte, stop=["of", "elf", "fi", "'", "eturn"])] * 4 for byte in " rl"
    ],
    "a pattern at the text's end (sglang#23802)": [
        [asking(stop_regex=pattern)] * 4 for pattern in ("t$", "[a-e]$", " .$")
    ],
    "a stop string before the limit": [[asking(limit, stop=["e", "s"])] * 4 for limit in LIMITS],
}
CALLS = [{"input_ids": PROMPTS, "sampling_params": params} for calls in ENDS.values() for params in calls]


def queue(engines: Engines, sites: Sites) -> None:
    """Plain decoding and a tree in the first release of each generation and in the last of all."""
    for version in RELEASES:
        here = Release(engines, sites, version, ahead=version in harness.SECOND_WORKER)
        here.plain(f"plain {version}", CALLS)
        here.ddtree(f"tree {version}", 16, CALLS)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("version", RELEASES)
def test_a_request_ends_where_plain_decoding_ends_it(engines: Engines, version: str, end: str):
    """Each release by its own plain decoding: which of two ends at one token it names differs."""
    first = sum(len(calls) for name, calls in ENDS.items() if list(ENDS).index(name) < list(ENDS).index(end))
    own = slice(first, first + len(ENDS[end]))

    got, plain = (engines[f"{kind} {version}"]["calls"][own] for kind in ("tree", "plain"))

    assert [(call["output_ids"], call["finish"]) for call in got] == [
        (call["output_ids"], call["finish"]) for call in plain
    ]
