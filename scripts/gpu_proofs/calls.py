# SPDX-License-Identifier: Apache-2.0
"""What the engines of `gpu_prove` are asked: calls of `scripts/engine_job`."""

from __future__ import annotations

import argparse
import json
from typing import Any


def prompts(options: argparse.Namespace, count: int) -> list[list[int]]:
    """Prompts of the pair, cut to different lengths; 1 and 2 tokens among them."""
    every = json.loads((options.pair / "prompts.json").read_text())
    cuts = (1, 2, 7, 16, 33, 64, 100, 300)
    longest = 64 if options.cpu else 300
    return [every[i % len(every)][: min(longest, cuts[i % len(cuts)])] for i in range(count)]


def greedy(input_ids: list[list[int]], tokens: int, **more: Any) -> dict[str, Any]:
    """A batch, decoded to `tokens` tokens each."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return {"input_ids": input_ids, "sampling_params": sampling} | more


def texts(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Single requests and batches of every size, then a second turn of the last batch."""
    some, tokens = prompts(options, 3 if options.cpu else 16), 6 if options.cpu else 64
    sizes = (1, 2) if options.cpu else (1, 2, 3, 5, 8, 16)
    return [*(greedy(some[:n], tokens) for n in sizes), greedy([[5, 6, 7]] * sizes[-1], tokens, behind=len(sizes) - 1)]
