# SPDX-License-Identifier: Apache-2.0
"""What a step takes in the made-up server of `choosing_world`: invented, or read from a measured run.

The two runs are those with SGLang's own attention kernel, in which a wide batch costs most. Import it where the overlay
can be imported (`overlay_modules.overlay_importable`).
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import numpy as np
from sglang.srt.speculative.ddtree.round_times import Choice
from sglang.srt.speculative.ddtree.start_up_times import prior_of

from choosing_texts import CHOICES, NONE


BUCKETS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48)
RESULTS = Path(__file__).resolve().parent / "results"
MEASURED = RESULTS / "0.5.11-8b-sglang-attention.json"
OVERLAPPED = RESULTS / "0.5.17-8b-sglang-attention.json"

#: Milliseconds of a step, by batch size and choice.
Cost = Callable[[int, Choice], float]


def memory_bound(batch_size: int, choice: Choice) -> float:
    """Weights are read once whatever the width; a little is added by each token."""
    return 0.5 + (0 if choice.shape == "none" else 2.0) + 7.0 + 0.004 * batch_size * choice.width


def staircase(batch_size: int, choice: Choice) -> float:
    """Compute-bound in tiles of 128 tokens, as soon as there are more than 256 of them."""
    tiles = -(-batch_size * choice.width // 128)
    return 0.5 + (0 if choice.shape == "none" else 2.0 + 0.02 * batch_size) + max(7.0, 3.2 * tiles)


@cache
def measured(file: Path = MEASURED) -> tuple[Mapping[tuple[int, Choice], float], Callable[[int], float]]:
    """Of a run of `decode.py`: what the graphs of each bucket and choice take, and what a tree takes beside them.

    Where steps that draft nothing were no arm of it, they are taken to cost what plain decoding does, three tenths of
    it beside the graph.
    """
    run = json.loads(file.read_text())
    info = run["engines"]["ddtree"]["info"]
    verify = {(int(w), int(b)): t for w, row in info["ddtree_verify_ms"].items() for b, t in row.items()}
    draft = {int(b): t for b, t in info["ddtree_draft_ms"].items()}
    beside: dict[int, list[float]] = {}
    for cell in run["figures"]["cells"]:
        size, name, step = cell["concurrency"], cell["arm"], cell["step_ms"]["pooled"]
        if name == "plain" and "1" not in info["ddtree_verify_ms"]:
            verify[1, size] = 0.7 * step
        budget = name.removeprefix("DDTREE ")
        if budget.isdigit() and int(budget) and size in draft and (int(budget) + 1, size) in verify:
            beside.setdefault(size, []).append(step - verify[int(budget) + 1, size] - draft[size])
    sizes = sorted(beside)
    found = [statistics.median(beside[size]) for size in sizes]
    return prior_of((*CHOICES, NONE), BUCKETS, verify, draft), lambda size: float(np.interp(size, sizes, found))


def graphs(batch_size: int, choice: Choice) -> float:
    """Milliseconds of the graphs on an H200, of a batch as large as its graph."""
    return measured()[0][bucket_of(batch_size), choice]


def host_bound(batch_size: int, choice: Choice) -> float:
    """The graphs on an H200 and what the first generation's host adds, with an 8B model."""
    return graphs(batch_size, choice) + (
        0.43 * graphs(batch_size, choice) if choice == NONE else measured()[1](batch_size)
    )


def overlapped(batch_size: int, choice: Choice) -> float:
    """The second generation on an H200, an 8B model: what plain decoding takes beside its graph is the same for all."""
    found, beside = measured(OVERLAPPED)
    return found[bucket_of(batch_size), choice] + (0.85 if choice == NONE else beside(batch_size))


def overlapped_graphs(batch_size: int, choice: Choice) -> float:
    """Milliseconds of its graphs alone."""
    return measured(OVERLAPPED)[0][bucket_of(batch_size), choice]


def compute_bound(batch_size: int, choice: Choice) -> float:
    """The graphs alone, as where the host is a step ahead."""
    return graphs(batch_size, choice) + 0.3


def hidden(batch_size: int, choice: Choice) -> float:
    """A small model, whose graphs are over before the host is."""
    return max(4.0 + 0.02 * batch_size, 0.3 * graphs(batch_size, choice))


def tiny(batch_size: int, choice: Choice) -> float:
    """A model of a few layers: the host does the same for every width, and half of it where nothing is drafted."""
    return max((1.3 if choice == NONE else 2.8) + 0.01 * batch_size, tiny_graphs(batch_size, choice))


def tiny_graphs(batch_size: int, choice: Choice) -> float:
    """Milliseconds of its graphs, far below the host's time: as those of `tests/data/tiny_pair` on an H200."""
    return 0.1 + 5e-5 * batch_size * choice.width + (0.0 if choice == NONE else 0.07 + 0.0006 * batch_size)


def waiting(batch_size: int, choice: Choice) -> float:
    """A device that waits for launches, and then for the widest of its graphs."""
    return (0.9 if choice == NONE else 1.2) + small_graphs(batch_size, choice)


def small_graphs(batch_size: int, choice: Choice) -> float:
    """Milliseconds of the graphs of 16 million parameters, as those of `bench_pair` on an H200."""
    return 0.2 + 2.3e-4 * batch_size * choice.width + (0.0 if choice == NONE else 0.1 + 0.002 * batch_size)


def unsteady(batch_size: int, choice: Choice) -> float:
    """The first generation's host with 16 million parameters: it hides what all but the widest graphs take."""
    host = (1.9 if choice == NONE else 2.9) + 0.012 * batch_size
    return max(host, 1.2 + small_graphs(batch_size, choice))


def beside_graphs(batch_size: int, choice: Choice) -> float:
    """A host beside the graphs of 45 million parameters."""
    return (1.6 if choice == NONE else 2.3) + 0.012 * batch_size


def three_small_graphs(batch_size: int, choice: Choice) -> float:
    """Milliseconds of the graphs of three times as many parameters."""
    return 3.0 * small_graphs(batch_size, choice)


def least_of_device(batch_size: int, choice: Choice) -> float:
    """Those, and what else the device does in a step."""
    return 0.6 + three_small_graphs(batch_size, choice)


def shared_graphs(batch_size: int, choice: Choice) -> float:
    """Milliseconds that graphs seem to take while other engines use the GPU: two to five times as long, by chance."""
    return graphs(batch_size, choice) * random.Random(f"{batch_size} {choice}").uniform(2, 5)  # noqa: S311  (no secret)


def bucket_of(batch_size: int) -> int:
    """The graph that a batch is padded to."""
    return next((bucket for bucket in BUCKETS if bucket >= batch_size), BUCKETS[-1])


def start_up(cost: Cost, *, without: float = 0.0, wrong: float = 0.01) -> dict[tuple[int, Choice], float]:
    """What a start-up measurement would say.

    Args:
        cost: What the graphs really take.
        without: Milliseconds of it that it does not see.
        wrong: Relative spread of its error.
    """
    random_ = random.Random(3)  # noqa: S311  (errors, no secrets)
    return {
        (bucket, choice): (cost(bucket, choice) - without) * (1 + wrong * random_.uniform(-1, 1))
        for bucket in BUCKETS
        for choice in (*CHOICES, NONE)
    }
