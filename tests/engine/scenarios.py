# SPDX-License-Identifier: Apache-2.0
"""Traffic for the engine tests: flows of requests, written out or drawn from a seed, and what they must give.

A flow is checked against plain decoding of its requests, each to its own end: an aborted request must have got the
beginning of that, every other one all of it.
"""

from __future__ import annotations

import random
from typing import Any

from tests.engine.harness import BLOCK_SIZE, greedy, prompts, request


#: Longest request, prompt and output together.
CONTEXT = 512
BYTES = prompts(*range(32))
SHORT, LINE, LONG = BYTES[0], BYTES[1], (BYTES[1] * 6)[:330]

Flow = list[dict[str, Any]]


def prompt_of(draw: random.Random) -> list[int]:
    """One to a few hundred bytes; many begin alike, so that the prefix cache has hits."""
    size = draw.choice((1, 7, 40, 64, 64, 150, 330))
    start = draw.choice(BYTES[:4])
    rest = [byte for piece in draw.sample(BYTES, 8) for byte in piece]
    return (start + rest)[:size]


def parameters_of(draw: random.Random) -> dict[str, Any]:
    """What a request may ask for that cuts a path, changes logits, or makes it a sampled one."""
    kinds: list[dict[str, Any]] = [
        {"stop_token_ids": draw.sample(range(32, 122), 6)},
        {"stop": draw.sample([" t", "e ", "\n\n", "self", "ing", ")", "="], 3)},
        {"repetition_penalty": draw.choice((1.1, 1.8))},
        {"frequency_penalty": 1.5, "presence_penalty": draw.choice((0.0, 0.5))},
        {"min_new_tokens": 6, "stop_token_ids": draw.sample(range(32, 122), 12)},
        {"logit_bias": {str(token): draw.choice((-8.0, 3.0)) for token in draw.sample(range(32, 122), 3)}},
        {"temperature": draw.choice((0.7, 1.5)), "top_k": draw.choice((-1, 5)), "top_p": draw.choice((0.9, 1.0))},
        {},
        {},
    ]
    return draw.choice(kinds)


def draw_flow(draw: random.Random) -> Flow:
    """One to six requests that join, end and are aborted at any time."""
    flow: Flow = []
    for at in range(draw.randint(1, 6)):
        limit = draw.choice((1, 2, 9, 30, 48))
        parameters = parameters_of(draw)
        if "min_new_tokens" in parameters:
            parameters["min_new_tokens"] = min(6, limit)
        asked = request(prompt_of(draw), limit, **parameters)
        if at and draw.random() < 0.6:
            asked["after"] = [draw.randrange(at), draw.randint(1, 20)]
        if limit > 9 and draw.random() < 0.15:
            asked["abort_after"] = draw.randint(1, limit)
        flow.append(asked)
    return flow


def draw_engine(draw: random.Random) -> dict[str, Any]:
    """Arguments of a DDTREE engine: budget, cap and block, and pools small enough to run full."""
    return {
        "speculative_ddtree_budget": draw.choice((1, 2, 3, 5, 7, 8, 15, 16, 24, 40, 63)),
        "speculative_ddtree_topk_cap": draw.choice((None, None, None, 1, 2, 5)),
        "speculative_dflash_block_size": draw.choice((BLOCK_SIZE, BLOCK_SIZE, 2, 5)),
        "max_running_requests": draw.choice((2, 4, 8)),
        "max_total_tokens": draw.choice((640, 1024, 4096)),
        "chunked_prefill_size": draw.choice((32, 100, 2048)),
        "disable_radix_cache": draw.random() < 0.25,
        "schedule_policy": draw.choice(("fcfs", "lpm")),
    }


#: Budgets of an engine whose requests wish for different ones; the chain is the one of 7.
LANES = "0,3,7,16"


def wishing(flow: Flow) -> Flow:
    """The same requests, each asking for a budget: one alone gets it; where they disagree the configured one holds."""
    wishes = (3, "chain", None, 16, 0)
    return [
        asked
        if wishes[at % 5] is None
        else asked
        | {"sampling_params": asked["sampling_params"] | {"custom_params": {"ddtree_budget": wishes[at % 5]}}}
        for at, asked in enumerate(flow)
    ]


def problems(flow: Flow, got: dict[str, Any], plain: dict[str, Any]) -> list[str]:
    """A line for each request whose tokens, or whose end, are not those of plain decoding."""
    found = []
    for at, asked in enumerate(flow):
        if asked["sampling_params"]["temperature"]:
            continue  # drawn tokens: there to stand in the same batch
        ours, expected = got["output_ids"][at], plain["output_ids"][at]
        ends = got["finish"][at]["type"], plain["finish"][at]["type"]
        if ends[0] == "abort" and "abort_after" in asked:
            expected = expected[: len(ours)]
        elif ends[0] != ends[1]:
            found.append(f"request {at} ended by {ends[0]}, plain decoding by {ends[1]}")
        if ours != expected:
            same = next((i for i, (a, b) in enumerate(zip(ours, expected, strict=False)) if a != b), None)
            same = min(len(ours), len(expected)) if same is None else same
            found.append(f"request {at} differs from token {same} on: {ours[same:][:5]}, plain {expected[same:][:5]}")
    return found


#: Compositions that must be right at every budget.
FLOWS: dict[str, Flow] = {
    "7, 330 and 64 tokens together": [request(SHORT), request(LONG), request(LINE)],
    "joining and leaving": [
        request(SHORT, 60),
        request(LINE, 12) | {"after": [0, 10]},
        request(BYTES[3], 40) | {"after": [1, 5]},
        request(LONG, 9) | {"after": [0, 30]},
    ],
    "aborted in the middle": [
        request(LINE, 60),
        request(SHORT, 400) | {"abort_after": 11},  # long, so that its end cannot come before the word of it
        request(BYTES[3], 40) | {"after": [1, 8]},
    ],
    "hits in the prefix cache": [request(LONG, 9), request(LONG, 30) | {"after": [0, 9]}, request(LONG[:200], 30)],
    "stop tokens inside a path": [request(p, 60, stop_token_ids=[10, 32, 46]) for p in (SHORT, LINE, BYTES[3])],
    "stop strings inside a path": [request(p, 60, stop=["e t", "self", "):"]) for p in (SHORT, LINE, BYTES[3])],
    "token limits inside a path": [request(LINE, limit) for limit in (1, 2, 3, 4, 5, 6)],
    "end of the context": [request((LINE * 9)[:size], CONTEXT - size) for size in (480, 495, 505)],
    "penalised among others": [
        request(LINE, 24, repetition_penalty=1.8),
        request(SHORT, 24),
        request(BYTES[3], 24, frequency_penalty=1.5, presence_penalty=0.5),
        request(LINE, 24, min_new_tokens=6, stop_token_ids=[10, 32, 46]),
        request(SHORT, 24, logit_bias={"32": -4.0}),
        # The end of the text is every step's best token (vllm_ddtree 8f450a23a).
        request(BYTES[3], 24, min_new_tokens=5, stop_token_ids=[0], logit_bias={"0": 200.0}),
    ],
    "sampled among greedy": [
        request(LINE, 30, temperature=1.0),
        request(SHORT, 30),
        request(BYTES[3], 30, temperature=0.8, top_k=5, min_p=0.05),
        request(LINE, 30),
    ],
}

#: Prompts of 7, 64 and 40 bytes.
ONE, THREE = prompts(0), prompts(0, 1, 3)
#: What every engine of the matrix decodes first.
CALLS = [greedy(ONE), greedy(THREE)]
#: What runs in an engine whose KV pool is too small for it, and whose prompts are prefilled in pieces.
TIGHT = FLOWS["7, 330 and 64 tokens together"] * 2 + FLOWS["hits in the prefix cache"]
#: The same full pool for requests whose tokens are counted: who loses its KV goes on counting where it was.
TIGHT_PENALISED = [
    asked | {"sampling_params": asked["sampling_params"] | counted}
    for asked, counted in zip(
        [request(LONG[:150], 48), request(LINE, 48), request(SHORT, 60)] * 2,
        [
            {"repetition_penalty": 1.3},
            {"frequency_penalty": 0.8, "presence_penalty": 0.3},
            {"min_new_tokens": 40, "stop_token_ids": [10, 32, 46], "ignore_eos": False},
        ]
        * 2,
        strict=True,
    )
]
#: Steps that draft nothing, trees while somebody else is there, and steps that draft nothing again.
NO_DRAFTS = {"custom_params": {"ddtree_budget": 0}}
SWITCHING = [
    request(LINE, 160, **NO_DRAFTS),
    request(SHORT, 12) | {"after": [0, 10]},
    request(BYTES[3], 16, repetition_penalty=1.8, **NO_DRAFTS) | {"after": [0, 40]},
]
#: Of the releases beside those of the whole matrix.
RELEASE_FLOWS = ("joining and leaving", "penalised among others", "stop strings inside a path")
