#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How near `auto` comes to the best fixed choice, in a simulation: no engine, no GPU, a minute on one core.

    python benchmarks/choosing.py [--regime NAME ...] [--seeds 3] [--first-seed 0] [--concurrency 1,2,4,8,16,32,48]

The real chooser and observer run in a made-up server (`choosing_world.py`), on made-up texts (`choosing_texts.py`).
Every number is tokens per second as a part of what the best single choice for that text and concurrency would have got,
known in hindsight: of the first 300 steps of a server, of its first 1000, and of 1000 after those. `1 to 48` is a batch
that grows and shrinks, `in turns` one of 1, 4, 16 and 48 for 100 steps each, with seconds of something else between
them, ten times. Times of graphs, and what a step takes beside them, are those of runs with SGLang's own attention
kernel (`results/*-sglang-attention.json`: of `crowded` 0.5.17's, else 0.5.11's); how they scatter and what is accepted
is invented.

    host      the first generation's host beside the graphs of an 8B model on an H200
    noisy     the same with steps that scatter by 10 %, drift as far, and three outliers in a hundred
    stalls    the host's, where one step in 400 begins a stall: ten steps that take four times as long
    compute   the graphs alone
    hidden    a small model: the host hides what the graphs take
    stairs    compute-bound in coarse tiles
    bluff     a drafter that is sure and wrong, with plain steps among the choices
    crowded   the second generation's, with plain steps among the choices: at 48 requests they are the best by far
    phases    a tiny model, and a host that is up to 1.8 times as slow for some tenths of a second to some seconds
    slower    the first generation's host with an 8B model, up to 1.2 times as slow for as long
    behind    a small model and overlap: the host needs 2 ms for a round, and the device waits for it
    unsteady  a small model without overlap, phases of up to 1.6, and steps that scatter by 12 %
    apart     phases of up to 1.9 of a host, and a small model's graphs, which these do not make longer: the best choice
              is another one in each, and figures are parts of the best in each phase
    shared    the first generation's host; start-up timed graphs while other engines used the GPU
    blind     no start-up measurement

Needs torch; the engine environment (`scripts/engine_env`) has it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parent))

from overlay_modules import overlay_importable


def regimes() -> dict[str, tuple[Callable[..., Any], Any]]:
    """By name: a call that makes a server, and the text that it decodes."""
    import choosing_costs as made_up
    import choosing_texts as texts
    from choosing_world import World

    def server(cost: Any, prior: Any = made_up.graphs, **kwargs: Any) -> Callable[..., Any]:
        known = None if prior is None else made_up.start_up(prior)
        return lambda seed: World(cost, prior=known, seed=seed, **kwargs)

    code, prose = texts.CODE, texts.PROSE
    plain_too = (*texts.CHOICES, texts.NONE)
    return {
        "host": (server(made_up.host_bound), prose),
        "noisy": (server(made_up.host_bound, noise=0.1, drift=0.1, outliers=0.03), prose),
        "stalls": (server(made_up.host_bound, stalls=1 / 400), prose),
        "compute": (server(made_up.compute_bound), prose),
        "hidden": (server(made_up.hidden, lambda size, choice: 0.3 * made_up.graphs(size, choice)), code),
        "stairs": (server(made_up.staircase, lambda size, choice: made_up.staircase(size, choice) - 0.5), code),
        "bluff": (server(made_up.host_bound, choices=plain_too), texts.BLUFF),
        "crowded": (
            server(made_up.overlapped, made_up.overlapped_graphs, choices=plain_too),
            prose,
        ),
        "phases": (
            server(made_up.tiny, made_up.tiny_graphs, phases=1.8, choices=plain_too),
            texts.HARD,
        ),
        "slower": (server(made_up.host_bound, phases=1.2), prose),
        "behind": (
            server(made_up.waiting, made_up.small_graphs, gap=0.05, host=2.0, choices=plain_too),
            texts.HARD,
        ),
        "unsteady": (
            server(
                made_up.unsteady,
                made_up.small_graphs,
                phases=1.6,
                noise=0.12,
                drift=0.1,
                outliers=0.03,
                choices=plain_too,
            ),
            texts.HARD,
        ),
        "apart": (
            server(
                made_up.beside_graphs,
                made_up.three_small_graphs,
                device=made_up.least_of_device,
                phases=1.9,
                gap=0.05,
                fits=lambda *_: True,
                choices=plain_too,
            ),
            texts.HARD,
        ),
        "shared": (server(made_up.host_bound, made_up.shared_graphs), prose),
        "blind": (server(made_up.compute_bound, None), prose),
    }


def cell(make: Callable[..., Any], text: Any, size: int, seeds: Iterable[int]) -> tuple[list[float], Any]:
    """The three figures of a concurrency, means over seeds, and the best choice."""
    found = []
    for seed in seeds:
        world = make(seed)
        first = world.decode(text, size, steps=300)
        world.decode(text, size, steps=700)
        found.append((first, world.tokens / world.best_tokens, world.decode(text, size, steps=1000)))
    return [statistics.mean(column) for column in zip(*found, strict=True)], world.best(text, size)[1]


def wander(make: Callable[..., Any], text: Any, seeds: Iterable[int]) -> list[float]:
    """A batch that grows and shrinks by up to two requests every five steps: the first 1000 steps, then 1000 more."""

    def sizes(seed: int) -> list[int]:
        random_, size, found = random.Random(seed), 20, []  # noqa: S311  (sizes, no secrets)
        for _ in range(400):
            size = min(48, max(1, size + random_.randint(-2, 2)))
            found.append(size)
        return found

    return halves(make, text, seeds, sizes, steps=5)


def turns(make: Callable[..., Any], text: Any, seeds: Iterable[int]) -> list[float]:
    """Batches of few sizes for a moment each, and seconds of something else between: five turns, then five more."""
    return halves(make, text, seeds, lambda _: [1, 4, 16, 48] * 10, steps=100, pause=3000.0)


def halves(
    make: Callable[..., Any],
    text: Any,
    seeds: Iterable[int],
    sizes: Callable[[int], list[int]],
    *,
    steps: int,
    pause: float | None = None,
) -> list[float]:
    """Batches of one size after the other for so many steps: the first half of them, then the second; means."""
    found = []
    for seed in seeds:
        world, every, row = make(seed), sizes(seed), []
        middle = len(every) // 2
        for half in (every[:middle], every[middle:]):
            begin = world.tokens, world.best_tokens
            for size in half:
                if pause is not None:
                    world.pause(pause)
                world.decode(text, size, steps=steps)
            row.append((world.tokens - begin[0]) / (world.best_tokens - begin[1]))
        found.append(row)
    return [statistics.mean(column) for column in zip(*found, strict=True)]


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--regime", action="append", help="only this one; may be repeated")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--concurrency", default="1,2,4,8,16,32,48")
    options = parser.parse_args()
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    start = time.monotonic()
    with overlay_importable():
        print("simulated, parts of the best fixed choice  concurrency   first 300  first 1000   next 1000   best")
        for name, (make, text) in regimes().items():
            if options.regime and name not in options.regime:
                continue
            for size in map(int, options.concurrency.split(",")):
                (first, thousand, next_), best = cell(make, text, size, seeds)
                print(f"{name:<42} {size:>11} {first:>11.3f} {thousand:>11.3f} {next_:>11.3f}   {best}", flush=True)
            for mode, (thousand, next_) in {
                "1 to 48": wander(make, text, seeds),
                "in turns": turns(make, text, seeds),
            }.items():
                print(f"{name:<42} {mode:>11} {'':>11} {thousand:>11.3f} {next_:>11.3f}", flush=True)
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
