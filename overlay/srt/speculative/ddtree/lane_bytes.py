# SPDX-License-Identifier: Apache-2.0
"""Bytes that the CUDA graphs of several lanes take together, counted before any of them is captured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.speculative.ddtree.args import draft_width
from sglang.srt.speculative.ddtree.graph_memory import attention_bytes, grown_rows, hidden_bytes, logits_bytes
from sglang.srt.speculative.ddtree.shared_graphs import logits_rows, work_rows


@dataclass(frozen=True, slots=True)
class NodeBytes:
    """What graphs of the Triton backend take, in bytes.

    Args:
        buffers: The backend's graph buffers, for a verified node; a lane lies in those of a lane that has room.
        logits: The logits that graphs hand out, for a node.
        work: Logits as the model gives them, for a node: what a graph needs while it runs.
        hidden: Hidden states for the drafter, for a node; every graph keeps its own.
        request: The backend's KV indices, for a request.
    """

    buffers: int
    logits: int
    work: int
    hidden: int
    request: int

    @classmethod
    def of(cls, model_runner: Any) -> NodeBytes:
        """Those of a target, with its backend built."""
        backend, vocab_size = model_runner.attn_backend, int(model_runner.model_config.vocab_size)
        return cls(
            buffers=attention_bytes(backend),
            logits=logits_bytes(vocab_size),
            work=logits_bytes(vocab_size),
            hidden=hidden_bytes(model_runner),
            request=8 * (int(backend.max_context_len) + draft_width()),
        )


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
