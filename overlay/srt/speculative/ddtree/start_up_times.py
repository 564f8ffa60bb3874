# SPDX-License-Identifier: Apache-2.0
"""What a step costs in every lane, timed at start-up: replays of the captured graphs, before anything is served."""

from __future__ import annotations

import bisect
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from sglang.srt.speculative.ddtree.moments import Moments
from sglang.srt.speculative.ddtree.round_times import Choice


logger = logging.getLogger(__name__)

#: Batch sizes that are timed, at most; others lie between two of them.
_SIZES = 8
#: Replays that are timed, after one that is not.
_REPLAYS = 3

#: A call that replays one graph, or None where none was captured: of a width and a batch size.
Replay = Callable[[int, int], Callable[[], None] | None]


def timed_sizes(batch_sizes: Sequence[int]) -> list[int]:
    """The batch sizes to time: powers of two and the largest, evenly thinned to a few.

    Every tensor-parallel rank has to replay the same graphs as often, so that nothing here depends on a clock.

    Args:
        batch_sizes: What graphs were captured for, ascending.
    """
    found = sorted({size for size in batch_sizes if size & (size - 1) == 0} | set(batch_sizes[-1:]))
    if len(found) <= _SIZES:
        return found
    return [found[round(i * (len(found) - 1) / (_SIZES - 1))] for i in range(_SIZES)]


def time_graphs(widths: Sequence[int], batch_sizes: Sequence[int], replay: Replay) -> dict[tuple[int, int], float]:
    """Milliseconds of one replay, by width and batch size; waits for the device.

    The least of a few: a small graph is over before a host that is disturbed launches the next one.

    Args:
        widths: What graphs were captured for.
        batch_sizes: Sizes to time.
        replay: Finds a graph.
    """
    moments = Moments(on_gpu=True)
    marks: dict[tuple[int, int], list[Any]] = {}
    for size in batch_sizes:
        for width in widths:
            run = replay(width, size)
            if run is None:
                continue
            run()
            marks[width, size] = [moments.now()]
            for _ in range(_REPLAYS):
                run()
                marks[width, size].append(moments.now())
    if marks:
        torch.cuda.synchronize()
    return {
        key: min(start.elapsed_time(end) for start, end in itertools.pairwise(events)) for key, events in marks.items()
    }


def prior_of(
    choices: Sequence[Choice],
    buckets: Sequence[int],
    verify: Mapping[tuple[int, int], float],
    draft: Mapping[int, float],
) -> dict[tuple[int, Choice], float]:
    """Milliseconds of a step by bucket and choice, as far as start-up tells.

    Args:
        choices: What can be chosen.
        buckets: Batch sizes.
        verify: Milliseconds of a verify pass by width and batch size.
        draft: Milliseconds of a draft by batch size.
    """
    prior = {}
    for choice in choices:
        sizes = {size: time for (width, size), time in verify.items() if width == choice.width}
        for bucket in buckets:
            if sizes:
                drafted = 0.0 if choice.shape == "none" else _between(draft, bucket)
                prior[bucket, choice] = _between(sizes, bucket) + drafted
    return prior


def _between(times: Mapping[int, float], size: int) -> float:
    """The time of a batch size, on the line between the nearest two that were timed; 0 where nothing was."""
    if not times:
        return 0.0
    sizes = sorted(times)
    above = bisect.bisect_left(sizes, size)
    if above == len(sizes):
        return times[sizes[-1]] * size / sizes[-1] if size > 2 * sizes[-1] else times[sizes[-1]]
    if sizes[above] == size or above == 0:
        return times[sizes[above]]
    low, high = sizes[above - 1], sizes[above]
    return times[low] + (times[high] - times[low]) * (size - low) / (high - low)
