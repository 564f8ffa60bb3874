# SPDX-License-Identifier: Apache-2.0
"""How graphs of plain decoding come to keep the hidden states that the drafter reads, by the release."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.model_executor.runner import base_runner


@contextmanager
def with_hidden_states(model_runner: Any) -> Iterator[None]:  # noqa: ARG001  (earlier releases set its arguments)
    """Where such graphs are captured: their runners ask for what the server keeps, and keep no more than that."""
    asked = base_runner.get_server_return_hidden_states_mode
    base_runner.get_server_return_hidden_states_mode = lambda *_: CaptureHiddenMode.FULL
    try:
        yield
    finally:
        base_runner.get_server_return_hidden_states_mode = asked
