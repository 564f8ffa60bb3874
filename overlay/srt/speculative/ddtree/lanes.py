# SPDX-License-Identifier: Apache-2.0
"""Several verify widths in one engine: for each a *lane*, an attention backend and CUDA graphs of that width.

SGLang builds the widest lane itself, with everything that is sized by the width: KV reserves, rows, pools. A narrower
one is built here in the same way, and shares the widest one's graph buffers and graph memory. Switching assigns two
attributes of the target's model runner.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.speculative.ddtree.budgets import DEFAULT_BUDGET, budgets
from sglang.srt.speculative.ddtree.lane_parts import RUNNER, capture_graphs, replay_of
from sglang.srt.speculative.ddtree.lane_width import only_width
from sglang.srt.speculative.ddtree.memory import GRAPH_BUFFERS, report
from sglang.srt.speculative.ddtree.published import spec
from sglang.srt.speculative.ddtree.recapture import refuse_recapture


if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Lane:
    """One verify width.

    Args:
        width: Nodes per request, budget + 1.
        backend: The target's attention backend for it.
        runner: SGLang's decode graph runner, or whatever stands in its place without graphs.
        batch_sizes: Those that a graph was captured for, ascending.
    """

    width: int
    backend: Any
    runner: Any
    batch_sizes: tuple[int, ...] = ()


class Lanes:
    """The lanes of an engine.

    Args:
        model_runner: The target's, with its attention backend built.
        draft_runner: The drafter's, for the table of what the lanes cost.

    Attributes:
        widths: Every width that can be used, ascending; the last is the one that SGLang knows of.
    """

    def __init__(self, model_runner: Any, draft_runner: Any) -> None:
        self._model_runner, self._draft_runner = model_runner, draft_runner
        self.widths: tuple[int, ...] = tuple(budget + 1 for budget in budgets(spec()))
        self._lanes = {
            width: Lane(width, _backend_of(model_runner, width), None) for width in reversed(self.widths[:-1])
        }
        self._widest = Lane(self.widths[-1], model_runner.attn_backend, getattr(model_runner, RUNNER, None))
        self._lanes[self._widest.width] = self._widest

    def capture(self) -> None:
        """Capture the graphs of every lane but the widest, which SGLang has captured; without graphs nothing is done.

        Wide ones first: the narrower ones then find graph memory that is large enough for them, on the widest's stream.
        """
        self._widest = self._captured(self._widest, getattr(self._model_runner, RUNNER))
        self._lanes[self._widest.width] = self._widest
        lenders = [self._widest.backend]
        for width in reversed(self.widths[:-1]):
            lane = self._lanes[width]
            if not self._widest.batch_sizes:
                self._lanes[width] = replace(lane, runner=self._widest.runner)
                continue
            start, before = time.perf_counter(), _held_bytes()
            lend_buffers(lane.backend, lenders)
            self._lanes[width] = self._captured(lane, _graphs_of(self._model_runner, lane))
            lenders.append(lane.backend)
            if get_tp_group().rank_in_group == 0:
                logger.info(
                    "DDTREE: captured the lane of budget %d for up to %d requests (%d graphs) in %.1f s, %.2f GiB.",
                    width - 1,
                    self._lanes[width].batch_sizes[-1],
                    len(self._lanes[width].batch_sizes),
                    time.perf_counter() - start,
                    (_held_bytes() - before) / 2**30,
                )
        self.rest()
        if self._widest.batch_sizes:
            refuse_recapture(self._model_runner)
        if get_tp_group().rank_in_group == 0:
            report(self.all(), self._model_runner, self._draft_runner)

    def use(self, width: int) -> None:
        """Let the target verify with this width until the next `use` or `rest`; nothing waits for the device."""
        lane = self._lanes[width]
        self._model_runner.attn_backend = lane.backend
        setattr(self._model_runner, RUNNER, lane.runner)

    def rest(self) -> None:
        """Give SGLang its own backend and graphs back: whatever is not a verify step runs on them."""
        self.use(self._widest.width)

    def all(self) -> list[Lane]:
        """Every lane, the narrowest first."""
        return [self._lanes[width] for width in self.widths]

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Every batch size that some lane has a graph for, ascending; empty in an engine without graphs."""
        return tuple(sorted({size for lane in self._lanes.values() for size in lane.batch_sizes}))

    def timed(self, width: int, batch_size: int) -> Callable[[], None] | None:
        """A call that replays one captured verify graph, on whatever its buffers hold; None where none was captured.

        For timing it at start-up: the results are nobody's.
        """
        lane = self._lanes[width]
        return replay_of(lane.runner, batch_size) if batch_size in lane.batch_sizes else None

    def fits(self, width: int, batch_size: int) -> bool:
        """Whether a graph of this width serves so many requests; in an engine without graphs every width does."""
        if not self._widest.batch_sizes:
            return True
        lane = self._lanes[width]
        if lane.runner.disable_padding:
            return batch_size in lane.batch_sizes
        return bool(lane.batch_sizes) and batch_size <= lane.batch_sizes[-1]

    def _captured(self, lane: Lane, runner: Any) -> Lane:
        return replace(lane, runner=runner, batch_sizes=tuple(getattr(runner, "capture_bs", ())))


def _graphs_of(model_runner: Any, lane: Lane) -> Any:
    """A lane's graphs.

    Raises:
        ValueError: No memory is left for them; the text names the ways out.
    """
    try:
        return capture_graphs(model_runner, lane.backend, lane.width)
    except Exception as error:
        if "out of memory" not in str(error):
            raise
        raise ValueError(
            f"DDTREE: no memory is left for the CUDA graphs of a budget of {lane.width - 1}. Name fewer or narrower "
            f"budgets with --speculative-ddtree-budgets, use --speculative-ddtree-budget {DEFAULT_BUDGET} alone, or "
            "lower --cuda-graph-max-bs or --mem-fraction-static."
        ) from error


def lend_buffers(backend: Any, lenders: list[Any]) -> None:
    """Let a lane's backend use the graph buffers of others where those are large enough.

    Only one step runs at a time and every step writes its buffers anew, so that one set of them serves all lanes.

    Args:
        backend: A lane's backend; its graph buffers are about to be allocated.
        lenders: Backends that have theirs, the widest first.
    """
    allocate = backend.init_cuda_graph_state

    def allocate_and_borrow(max_bs: int, max_num_tokens: int, **given: Any) -> None:
        allocate(max_bs, max_num_tokens, **given)
        for name, own in list(vars(backend).items()):
            if not name.startswith(tuple(prefix for group in GRAPH_BUFFERS.values() for prefix in group)):
                continue
            found = [_part(getattr(lender, name, None), own) for lender in lenders]
            setattr(backend, name, next((part for part in found if part is not None), own))

    backend.init_cuda_graph_state = allocate_and_borrow


def _part(lent: Any, own: Any) -> Any:
    """The front of `lent` in the place of `own`, or None where `own` is no graph buffer or `lent` is too small."""
    if isinstance(getattr(own, "buffer", None), torch.Tensor):  # SGLang's `VerifyMask`
        buffer = _part(getattr(lent, "buffer", None), own.buffer)
        return None if buffer is None else _with_buffer(own, buffer)
    if not (isinstance(own, torch.Tensor) and isinstance(lent, torch.Tensor)) or own.ndim == 0:
        return None
    if lent.dtype != own.dtype or lent.shape[1:] != own.shape[1:] or lent.shape[0] < own.shape[0]:
        return None
    return lent[: own.shape[0]]


def _with_buffer(mask: Any, buffer: torch.Tensor) -> Any:
    import msgspec

    return msgspec.structs.replace(mask, buffer=buffer)


def _backend_of(model_runner: Any, width: int) -> Any:
    """The target's attention backend for one verify width, with a workspace of its own."""
    with only_width(model_runner, width):
        return model_runner._get_attention_backend(init_new_workspace=True)


def _held_bytes() -> int:
    """What PyTorch holds of the GPU for this process; what is free tells of other processes as well."""
    return torch.cuda.memory_reserved() if torch.cuda.is_available() else 0
