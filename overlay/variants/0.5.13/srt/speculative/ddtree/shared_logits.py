# SPDX-License-Identifier: Apache-2.0
"""One buffer of logits for the graphs of all lanes: this release shares buffers of one size alone.

A lane's logits are a gigabyte where its step has 2,000 nodes and the vocabulary 150,000 tokens. Only one step runs at
a time, and what it wrote is read before the next one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.model_executor import cuda_graph_runner
from sglang.srt.model_executor.input_buffers import _forward_input_buffer_pool


_LOGITS = "next_token_logits_buffer"


@contextmanager
def shared_logits() -> Iterator[None]:
    """Where a lane's graphs are captured: their logits lie in the front of the largest buffer that there is for any."""
    share = cuda_graph_runner.share_input_buffers_in

    def share_and_borrow(buffers: Any) -> None:
        own = getattr(buffers, _LOGITS)
        known = [lent for (name, *_), lent in _forward_input_buffer_pool.items() if name == _LOGITS]
        alike = [lent for lent in known if lent.dtype == own.dtype and lent.device == own.device]
        largest = max(alike, key=lambda lent: lent.numel(), default=own)
        if largest.numel() >= own.numel():
            setattr(buffers, _LOGITS, largest.view(-1)[: own.numel()].view(own.shape))
        share(buffers)

    cuda_graph_runner.share_input_buffers_in = share_and_borrow
    try:
        yield
    finally:
        cuda_graph_runner.share_input_buffers_in = share
