# SPDX-License-Identifier: Apache-2.0
"""What plain decoding of a speculative batch is made of, by the release."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.runner import base_runner


def decode_batch(batch: Any, model_runner: Any) -> ForwardBatch:
    """The batch as the target decodes it plainly, with all hidden states; `batch` holds what that reads."""
    batch.forward_mode = ForwardMode.DECODE
    return ForwardBatch.init_new(
        batch, model_runner, capture_hidden_mode=CaptureHiddenMode.FULL, return_hidden_states_before_norm=False
    )


@contextmanager
def with_hidden_states(model_runner: Any) -> Iterator[None]:  # noqa: ARG001
    """Where graphs of plain decoding are captured: they keep the hidden states that the drafter reads.

    Graph runners ask for what the server keeps; what they keep at most is fixed when they are made.
    """
    asked = base_runner.get_server_return_hidden_states_mode
    base_runner.get_server_return_hidden_states_mode = lambda *_: CaptureHiddenMode.FULL
    try:
        yield
    finally:
        base_runner.get_server_return_hidden_states_mode = asked
