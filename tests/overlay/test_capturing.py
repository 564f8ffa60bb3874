# SPDX-License-Identifier: Apache-2.0
"""How graphs are captured behind SGLang's own: in the same memory, and without the hooks that it registers late."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import pytest
import torch
from sglang.srt.distributed import parallel_state
from sglang.srt.model_executor.hook_manager import register_forward_hooks
from sglang.srt.speculative.ddtree import capturing, lane_parts
from tests.overlay.publishing import publish


if TYPE_CHECKING:
    from collections.abc import Iterator

MODULE: Any = vars(lane_parts).get("cuda_graph_runner") or vars(lane_parts)["decode_cuda_graph_runner"]
SGLANGS: Any = getattr(MODULE, "CudaGraphRunner", None) or MODULE.DecodeCudaGraphRunner


class Group:
    """A tensor-parallel group of a GPU that is not there, entered by SGLang's own function."""

    rank_in_group, pynccl_comm, pymscclpp_comm = 1, None, None

    def __init__(self) -> None:
        self.device_module = SimpleNamespace(Stream=MagicMock, stream=nullcontext)
        self.ca_comm, self.captures = self, 0

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Where the custom all-reduce registers its buffers."""
        self.captures += 1
        yield

    def graph_capture(self, *args: Any, **given: Any) -> Any:
        return parallel_state.GroupCoordinator.graph_capture(self, *args, **given)


class Runner(SGLANGS):
    """SGLang's graph runner, for no batch size; it captures as it is made."""

    def __init__(self, model_runner: Any, **_: Any) -> None:
        self.model_runner, self.capture_bs = model_runner, []
        self.enable_profile_cuda_graph = self.enable_pdmux = self.enable_torch_compile = False
        self.buffers, self.seq_len_fill_value = MagicMock(), 1
        self.backend = SimpleNamespace(capture_session=nullcontext)
        self.saw = model_runner.model(torch.ones(1))
        self.capture()

    def warmup(self) -> None:
        """Nothing."""

    def _capture_one_stream(self, *_: Any) -> None:
        """Nothing."""


def adding(_: Any) -> Any:
    """The factory of a hook."""
    return lambda _module, _given, found: found + 1


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    found = SimpleNamespace(forward_hooks=None, speculative_num_draft_tokens=17, enable_cudagraph_gc=False)
    publish(found)
    monkeypatch.setattr(capturing, "observability", lambda: found)
    return found


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    made = Group()
    for name in ("get_tp_group", "get_pp_group"):
        monkeypatch.setattr(parallel_state, name, lambda: made)
    monkeypatch.setattr(parallel_state, "get_current_device_stream_fast", MagicMock)
    stream = MagicMock()
    monkeypatch.setattr(MODULE, "get_or_create_global_graph_capture_stream", lambda *_: stream, raising=False)
    return made


@pytest.fixture
def model_runner(arguments: SimpleNamespace, group: Group) -> SimpleNamespace:
    """A target's, with the graphs that SGLang has captured."""
    runner = SimpleNamespace(server_args=arguments, tp_group=group, device="cpu", gpu_id=0, model=torch.nn.Identity())
    runner.model.shared_experts_config = None
    setattr(runner, lane_parts.RUNNER, Runner(runner))
    return runner


def test_all_lanes_are_captured_on_one_stream(model_runner: SimpleNamespace, group: Group) -> None:
    """PyTorch gives memory of a graph pool to one stream only; every group captures with it, and nothing stays."""
    capture, captures = MODULE.graph_capture, group.captures
    widest = getattr(model_runner, lane_parts.RUNNER)

    lanes = [lane_parts.capture_graphs(model_runner, "backend", width) for width in (9, 5)]

    assert [lane.stream is widest.stream for lane in lanes] == [True, True]
    assert group.captures == 3 * captures
    assert MODULE.graph_capture is capture
    if not hasattr(MODULE, "get_or_create_global_graph_capture_stream"):  # newer releases have one for all graphs
        assert Runner(model_runner).stream is not widest.stream


@pytest.mark.usefixtures("group")
def test_a_stream_that_sglang_names_is_taken() -> None:
    """From 0.5.19 on it has one for everything that it captures."""
    named = MagicMock()

    with capturing.on_stream(MODULE, MagicMock()), MODULE.graph_capture(stream=named) as context:
        assert context.stream is named


def test_no_hook_of_the_users_is_captured_in_a_lane(model_runner: SimpleNamespace, arguments: SimpleNamespace) -> None:
    """SGLang captures its own graphs before it registers them; outside of graphs they run as ever."""
    arguments.forward_hooks = [{"target_modules": [""], "hook_factory": f"{__name__}:adding"}]
    register_forward_hooks(model_runner.model, arguments.forward_hooks)

    lane = lane_parts.capture_graphs(model_runner, "backend", 9)

    assert float(lane.saw) == 1.0
    assert float(model_runner.model(torch.ones(1))) == 2.0


def test_other_hooks_are_captured(model_runner: SimpleNamespace, arguments: SimpleNamespace) -> None:
    """A model's own were there when SGLang captured."""
    arguments.forward_hooks = [{"target_modules": ["layers.*"], "hook_factory": f"{__name__}:adding"}]
    model_runner.model.register_forward_hook(adding(None))

    assert float(lane_parts.capture_graphs(model_runner, "backend", 9).saw) == 2.0
