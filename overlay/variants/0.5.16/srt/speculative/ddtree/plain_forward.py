# SPDX-License-Identifier: Apache-2.0
"""What plain decoding of a speculative batch is made of, by the release."""

from __future__ import annotations

from typing import Any

from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode


def decode_batch(batch: Any, model_runner: Any) -> ForwardBatch:
    """The batch as the target decodes it plainly, with all hidden states; `batch` holds what that reads."""
    batch.forward_mode = ForwardMode.DECODE
    return ForwardBatch.init_new(
        batch, model_runner, capture_hidden_mode=CaptureHiddenMode.FULL, return_hidden_states_before_norm=False
    )
