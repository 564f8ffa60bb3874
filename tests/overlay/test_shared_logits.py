# SPDX-License-Identifier: Apache-2.0
"""SGLang 0.5.13 shares graph buffers of one size alone: each lane would have its logits in a buffer of its own."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.variants import variant


VOCABULARY = 7


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The two modules of 0.5.13, which another release is installed in the place of here."""
    pool: dict[Any, torch.Tensor] = {}

    def share_input_buffers_in(buffers: Any) -> None:
        for name, buffer in vars(buffers).items():
            known = pool.setdefault((name, buffer.numel(), buffer.dtype, buffer.device), buffer)
            setattr(buffers, name, known.as_strided(buffer.size(), buffer.stride()))

    runner = SimpleNamespace(share_input_buffers_in=share_input_buffers_in)
    inputs = ModuleType("sglang.srt.model_executor.input_buffers")
    vars(inputs)["_forward_input_buffer_pool"] = pool
    package = importlib.import_module("sglang.srt.model_executor")
    monkeypatch.setattr(package, "cuda_graph_runner", runner, raising=False)
    monkeypatch.setitem(sys.modules, "sglang.srt.model_executor.cuda_graph_runner", runner)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "sglang.srt.model_executor.input_buffers", inputs)
    return SimpleNamespace(
        runner=runner, share=share_input_buffers_in, shared_logits=variant("0.5.13", "shared_logits").shared_logits
    )


def buffers(nodes: int) -> SimpleNamespace:
    """Of a graph runner for so many nodes."""
    return SimpleNamespace(input_ids=torch.zeros(nodes), next_token_logits_buffer=torch.zeros(nodes, VOCABULARY))


def test_lanes_lie_in_the_largest_buffer_of_logits(sglang: SimpleNamespace) -> None:
    """A wider one, captured for fewer requests, may be the smaller one; all other buffers are SGLang's affair."""
    widest, most, least = buffers(64), buffers(80), buffers(10)
    sglang.runner.share_input_buffers_in(widest)
    for lane in (most, least):
        with sglang.shared_logits():
            sglang.runner.share_input_buffers_in(lane)

    addresses = [lane.next_token_logits_buffer.data_ptr() for lane in (widest, most, least)]
    assert addresses[1] == addresses[2] != addresses[0]
    assert [lane.next_token_logits_buffer.shape for lane in (widest, most, least)] == [(64, 7), (80, 7), (10, 7)]
    assert least.next_token_logits_buffer.is_contiguous()
    assert least.input_ids.data_ptr() != most.input_ids.data_ptr()
    assert sglang.runner.share_input_buffers_in is sglang.share
