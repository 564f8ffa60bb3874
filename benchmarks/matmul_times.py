#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How long the matrix products of a step take, by rows: what a verify width costs beside attention.

    benchmarks/matmul_times.py [--like 8b] [--rows 64,128,136,256,288] [--out FILE]

All layers' products with weights and the head, in one CUDA graph, as a step replays them; of every number of rows the
least of a few replays. It is a staircase of the products' tiles: the default budgets (the overlay's `budgets.py`) are
read off it. Without --rows: what 1 to 48 requests verify with common budgets, and every eighth number up to 400. Needs
a GPU with room for the weights, and no SGLang.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    import torch

REQUESTS = (1, 2, 4, 8, 16, 32, 48)
BUDGETS = (0, 2, 4, 7, 8, 11, 15, 16, 20, 23, 24, 28, 31, 32, 40, 47, 63, 64, 96, 127, 128)
#: Rows above which a step is far more than matrix products that read weights.
MOST = 1100
REPLAYS = 3


def main() -> int:
    """Time, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--like", default="8b", help="8b, 4b or 1b: `padding.LIKE`")
    parser.add_argument("--rows", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    # Behind the arguments: imports take seconds, and `--help` does without.
    import torch

    torch.manual_seed(0)
    step = Step(options.like)
    found = {rows: milliseconds(step, rows) for rows in options.rows or common_rows()}
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "like": options.like}
    print(", ".join(about.values()))
    print("\n".join(f"{rows:>5} rows {took:7.2f} ms" for rows, took in found.items()))
    if options.out:
        options.out.write_text(json.dumps({"about": about, "ms": found}, indent=1) + "\n")
    return 0


def common_rows() -> list[int]:
    """Rows of steps, and a grid."""
    steps = {size * (budget + 1) for size in REQUESTS for budget in BUDGETS}
    return sorted({rows for rows in steps if rows <= MOST} | set(range(8, 400, 8)))


class Step:
    """The products of a step of a model of some shape, on weights of its own for each layer.

    Args:
        like: A name of `padding.LIKE`.
    """

    def __init__(self, like: str) -> None:
        from padding import LIKE

        shape = self.shape = LIKE[like]
        self.heads = shape.heads * shape.head_dim
        self.layers = [
            (
                weight(self.heads + 2 * shape.kv_heads * shape.head_dim, shape.hidden),
                weight(shape.hidden, self.heads),
                weight(2 * shape.mlp, shape.hidden),
                weight(shape.hidden, shape.mlp),
            )
            for _ in range(shape.layers)
        ]
        self.head = weight(shape.vocabulary, shape.hidden)

    def __call__(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        from torch.nn.functional import linear

        for qkv, out, up, down in self.layers:
            linear(hidden, qkv)
            linear(attended, out)
            linear(linear(hidden, up)[:, : self.shape.mlp].contiguous(), down)
        return linear(hidden, self.head)


def weight(rows: int, columns: int) -> torch.Tensor:
    """Random numbers, of which products draw the power that they draw of a model's."""
    import torch

    return 0.02 * torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)


def milliseconds(step: Step, rows: int) -> float:
    """The least of some replays of a graph with one step."""
    import torch

    given = [torch.randn(rows, size, device="cuda", dtype=torch.bfloat16) for size in (step.shape.hidden, step.heads)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(*given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step(*given)
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return round(min(times), 3)


if __name__ == "__main__":
    sys.exit(main())
