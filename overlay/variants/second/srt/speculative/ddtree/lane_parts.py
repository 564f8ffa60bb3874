# SPDX-License-Identifier: Apache-2.0
"""What a lane is made of in the releases of the second worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.model_executor.runner import decode_cuda_graph_runner
from sglang.srt.speculative.ddtree.capturing import on_stream, without_forward_hooks
from sglang.srt.speculative.ddtree.kept_states import with_hidden_states
from sglang.srt.speculative.ddtree.lane_width import only_width
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm


#: The model runner's attribute that holds its decode graphs.
RUNNER = "decode_cuda_graph_runner"


def capture_graphs(model_runner: Any, backend: Any, width: int) -> Any:
    """The target's decode graphs for one verify width, by the class that SGLang chose for its own."""
    own = getattr(model_runner, RUNNER)
    with (
        only_width(model_runner, width),
        _decoding(model_runner, plainly=width == 1),
        on_stream(decode_cuda_graph_runner, own.stream),
        without_forward_hooks(model_runner.model),
    ):
        return type(own)(model_runner, attn_backend=backend, speculative_num_draft_tokens=width)


def outputs_of(runner: Any) -> list[Any]:
    """What the runner's graphs hand out, and keep."""
    return list(getattr(getattr(runner, "backend", None), "_outputs", {}).values())


def replay_of(runner: Any, batch_size: int) -> Callable[[], None]:
    """A call that replays the graph of one batch size, on whatever its buffers hold."""

    def replay() -> None:
        runner.backend.replay(runner._make_graph_key(batch_size), None)

    return replay


@contextmanager
def _decoding(model_runner: Any, *, plainly: bool) -> Iterator[None]:
    """Where graphs are captured: those of plain decoding, which keep the hidden states that the drafter reads."""
    if not plainly:
        yield
        return
    algorithm, model_runner.spec_algorithm = model_runner.spec_algorithm, SpeculativeAlgorithm.NONE
    try:
        with with_hidden_states(model_runner):
            yield
    finally:
        model_runner.spec_algorithm = algorithm
