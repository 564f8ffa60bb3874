# SPDX-License-Identifier: Apache-2.0
"""Bytes that CUDA graphs take, those of several lanes together, counted before any of them is captured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.speculative.ddtree.args import draft_width
from sglang.srt.speculative.ddtree.graph_memory import attention_bytes, grown_rows, hidden_bytes, logits_bytes
from sglang.srt.speculative.ddtree.shared_graphs import logits_rows, work_rows


@dataclass(frozen=True, slots=True)
class NodeBytes:
    """What graphs take, in bytes.

    Args:
        buffers: The attention backend's graph buffers, for a verified node; a lane lies in those of one that has room.
        logits: The logits that graphs hand out, for a node.
        work: Logits as the model gives them, for a node: what a graph needs while it runs.
        hidden: Hidden states for the drafter, for a node; every graph keeps its own.
        request: The backend's KV indices or page tables, for a request.
    """

    buffers: int
    logits: int
    work: int
    hidden: int
    request: int

    @classmethod
    def of(cls, model_runner: Any) -> NodeBytes:
        """Those of a target whose backend is built, which is Triton's: no other one serves several lanes."""
        backend = model_runner.attn_backend
        request = 8 * (int(backend.max_context_len) + draft_width())
        return cls.with_attention(model_runner, buffers=attention_bytes(backend), request=request)

    @classmethod
    def with_attention(cls, model_runner: Any, *, buffers: int, request: int) -> NodeBytes:
        """Those of a target, on a backend that takes so much for a node and for a request."""
        logits = logits_bytes(int(model_runner.model_config.vocab_size))
        return cls(buffers, logits=logits, work=logits, hidden=hidden_bytes(model_runner), request=request)


@dataclass(frozen=True, slots=True)
class Planned:
    """Graphs that are about to be captured for the target's widest lane.

    Args:
        model_runner: The target's.
        batch_sizes: Ascending.
    """

    model_runner: Any
    batch_sizes: Sequence[int]


_planned: list[Planned] = []


def plan(graphs: Planned | None) -> None:
    """Note what SGLang has chosen to capture next, None for a drafter: attention backends are told only the largest."""
    _planned[:] = [] if graphs is None else [graphs]


def planned() -> Planned | None:
    """What `plan` was told last."""
    return _planned[0] if _planned else None


def lanes_bytes(lanes: Iterable[tuple[int, Sequence[int]]], node: NodeBytes) -> int:
    """Bytes of all graphs and their buffers.

    Args:
        lanes: Width and batch sizes of each, ascending, in the order in which they are captured.
        node: What a node and a request take.
    """
    captured = [(width, sizes) for width, sizes in lanes if sizes]
    nodes = [width * sizes[-1] for width, sizes in captured]
    return (
        node.buffers * grown_rows(nodes)
        + node.logits * logits_rows(nodes)
        + node.work * work_rows(nodes)
        + node.hidden * sum(width * sum(sizes) for width, sizes in captured)
        + node.request * grown_rows([sizes[-1] for _, sizes in captured])
    )
