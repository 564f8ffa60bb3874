# SPDX-License-Identifier: Apache-2.0
"""What a budget costs in memory: KV, graph buffers, logits, hidden and recurrent states. Told at a start."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.speculative.ddtree.held_slots import HELD, held_slots
from sglang.srt.speculative.ddtree.lane_parts import outputs_of


if TYPE_CHECKING:
    from sglang.srt.speculative.ddtree.lanes import Lane

logger = logging.getLogger(__name__)

#: What the names of a backend's graph buffers begin with, by what they hold.
GRAPH_BUFFERS = {
    "mask": ("cuda_graph_custom_mask", "_verify_mask"),
    "KV indices": ("cuda_graph_kv_indices", "cuda_graph_window_kv_indices"),
    "partial attention": ("cuda_graph_attn", "cuda_graph_swa_attn", "cuda_graph_num_kv_splits", "cuda_graph_lean"),
}


@dataclass(frozen=True, slots=True)
class LaneMemory:
    """What one lane costs, in bytes.

    Args:
        budget: Draft nodes.
        requests: The largest batch that a graph was captured for, 0 without graphs.
        held: KV slots that a request holds beyond its committed tokens while it is verified with this lane.
        kv_request: Bytes of these slots, target and drafter.
        kv_all: The same for as many requests as may run.
        buffers: Bytes of the backend's graph buffers by what they hold; those of narrow lanes lie in a wide one's.
        logits: Bytes of the logits that its graphs write; how many lanes share them depends on the release.
        hidden: Bytes of the hidden states that its graphs keep, one by one, for the drafter.
        states: Bytes of recurrent states that are kept for the nodes of a step.
    """

    budget: int
    requests: int
    held: int
    kv_request: int
    kv_all: int
    buffers: dict[str, int]
    logits: int
    hidden: int
    states: int


def lane_memory(lane: Lane, target: Any, draft: Any) -> LaneMemory:
    """What a lane costs, from its real buffers.

    Args:
        lane: With its graphs captured, if there are any.
        target: The target's model runner.
        draft: The drafter's.
    """
    held = held_slots(lane.width, int(target.page_size))
    slot = slot_bytes(target.token_to_kv_pool) + slot_bytes(draft.token_to_kv_pool)
    return LaneMemory(
        budget=lane.width - 1,
        requests=lane.batch_sizes[-1] if lane.batch_sizes else 0,
        held=held,
        kv_request=held * slot,
        kv_all=held * slot * int(target.max_running_requests),
        buffers={
            what: sum(t.nbytes for t in graph_tensors(lane.backend, *names)) for what, names in GRAPH_BUFFERS.items()
        },
        logits=_nbytes(_logits_of(lane)),
        hidden=sum(_nbytes(getattr(output, "hidden_states", None)) for output in outputs_of(lane.runner)),
        states=state_bytes(target.req_to_token_pool),
    )


def report(lanes: list[Lane], target: Any, draft: Any) -> None:
    """Log the table of every lane, and what all of them hold together.

    Args:
        lanes: The narrowest first.
        target: The target's model runner.
        draft: The drafter's.
    """
    rows = [lane_memory(lane, target, draft) for lane in lanes]
    titles = [
        "budget",
        "requests",
        "KV slots",
        "KV a request",
        "KV of all",
        *GRAPH_BUFFERS,
        "logits",
        "hidden",
        "states",
    ]
    cells = [
        [
            str(row.budget),
            str(row.requests or "no graphs"),
            str(row.held),
            *map(_size, (row.kv_request, row.kv_all, *row.buffers.values(), row.logits, row.hidden, row.states)),
        ]
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in (titles, *cells)
    ]
    names = tuple(name for group in GRAPH_BUFFERS.values() for name in group)
    logger.info(
        "DDTREE: what each budget costs. All lanes together: buffers %s, logits %s, hidden states %s. %s.\n%s",
        _size(held_once(t for lane in lanes for t in graph_tensors(lane.backend, *names))),
        _size(held_once(logits for logits in map(_logits_of, lanes) if logits is not None)),
        _size(sum(row.hidden for row in rows)),
        HELD,
        "\n".join(lines),
    )


def held_once(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of all pieces of memory that these tensors lie in, each counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def graph_tensors(backend: Any, *prefixes: str) -> Iterator[torch.Tensor]:
    """The graph buffers of a backend whose names begin so."""
    for name, value in vars(backend).items():
        if name.startswith(prefixes):
            tensor = getattr(value, "buffer", value)  # SGLang's `VerifyMask` holds one
            if isinstance(tensor, torch.Tensor):
                yield tensor


def slot_bytes(pool: Any) -> int:
    """Bytes of one token's KV in all layers of a pool."""
    pool = getattr(pool, "full_kv_pool", pool)
    return sum(buffer[0].nbytes for buffer in (*pool.k_buffer, *pool.v_buffer))


def state_bytes(pool: Any) -> int:
    """Bytes of the recurrent states that a pool keeps for the nodes of a step; 0 without recurrent layers."""
    cache = getattr(getattr(pool, "mamba_pool", None), "mamba_cache", None)
    states = [value for name, value in vars(cache).items() if name.startswith("intermediate")] if cache else []
    tensors = [part for state in states for part in (state if isinstance(state, (list, tuple)) else [state])]
    return sum(_nbytes(tensor) for tensor in tensors)


def _logits_of(lane: Lane) -> torch.Tensor | None:
    """The buffer of logits that a lane's graphs write; None without graphs."""
    logits = getattr(getattr(lane.runner, "buffers", None), "next_token_logits_buffer", None)
    return logits if isinstance(logits, torch.Tensor) else None


def _nbytes(tensor: Any) -> int:
    return tensor.nbytes if isinstance(tensor, torch.Tensor) else 0


def _size(count: int) -> str:
    if count == 0:
        return "0"
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"
