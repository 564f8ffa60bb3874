# SPDX-License-Identifier: Apache-2.0
"""What `auto` is made of in an engine: the lanes as choices, their times at start-up, and who is told."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sglang.srt.speculative.ddtree.auto import Auto
from sglang.srt.speculative.ddtree.choice import Chooser
from sglang.srt.speculative.ddtree.lane_parts import RUNNER, replay_of
from sglang.srt.speculative.ddtree.observing import Observer
from sglang.srt.speculative.ddtree.report import Metrics, Report, labels_of, publish
from sglang.srt.speculative.ddtree.round_times import Choice
from sglang.srt.speculative.ddtree.start_up_times import prior_of, time_graphs, timed_sizes


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sglang.srt.speculative.ddtree.lanes import Lanes

logger = logging.getLogger(__name__)

#: Buckets of an engine without graphs.
_BUCKETS = (1, 2, 4, 8, 16, 32, 64)


def auto_of(
    lanes: Lanes, *, block_size: int, model_runner: Any, draft_runner: Any, group: Any, ran: Mapping[Choice, int]
) -> Auto:
    """Set `auto` up; on a GPU this times the captured graphs, for a second or two.

    Args:
        lanes: Captured.
        block_size: Tokens of a draft block.
        model_runner: The target's.
        draft_runner: The draft's model runner.
        group: The tensor-parallel group.
        ran: Steps of each choice so far, for the metrics.
    """
    choices = choices_of(lanes.widths, block_size)
    buckets = lanes.batch_sizes or _BUCKETS
    sizes = timed_sizes(lanes.batch_sizes)
    verify = time_graphs(lanes.widths, sizes, lanes.timed)
    draft = {size: time for (_, size), time in time_graphs((block_size,), sizes, _draft(draft_runner)).items()}
    chooser = Chooser(
        choices,
        buckets,
        chain_width=block_size,
        prior=prior_of(choices, buckets, verify, draft),
        fits=lanes.fits,
    )
    publish(
        "ddtree_verify_ms", {str(w): {str(s): round(t, 4) for (x, s), t in verify.items() if x == w} for w, _ in verify}
    )
    publish("ddtree_draft_ms", {str(size): round(time, 4) for size, time in draft.items()})
    if group.rank_in_group != 0:
        return Auto(chooser, None, group)
    labels = labels_of(group.rank_in_group)
    report = Report(chooser, None if labels is None else Metrics(labels), ran)
    publish("ddtree_plan", lambda: {str(bucket): str(chooser.best(bucket)) for bucket in chooser.times.buckets})
    logger.info(
        "DDTREE auto chooses among %s for batches of up to %s; %d graphs were timed.",
        ", ".join(map(str, choices)),
        ", ".join(map(str, buckets)),
        len(verify) + len(draft),
    )
    return Auto(chooser, Observer(chooser.rates.widths, model_runner.device), group, report.tell)


def choices_of(widths: Sequence[int], block_size: int) -> tuple[Choice, ...]:
    """What can be chosen among lanes: a tree of each (no draft with one node), and the chain where one is as wide."""
    chain = (Choice(block_size, "chain"),) if block_size in widths else ()
    return (*(Choice(width, "tree" if width > 1 else "none") for width in widths), *chain)


def _draft(draft_runner: Any) -> Callable[[int, int], Callable[[], None] | None]:
    """Finds the draft's graphs."""
    runner = getattr(draft_runner, RUNNER, None)
    captured = tuple(getattr(runner, "capture_bs", ()))

    def find(_: int, batch_size: int) -> Callable[[], None] | None:
        return replay_of(runner, batch_size) if batch_size in captured else None

    return find
