# SPDX-License-Identifier: Apache-2.0
"""What a lane is made of in the releases of the first worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm


#: The model runner's attribute that holds its decode graphs.
RUNNER = "graph_runner"

#: Whether a step can verify the root alone, without a draft: plain decoding.
DECODES_PLAINLY = True


def build_backend(model_runner: Any, width: int) -> Any:
    """The target's attention backend for one verify width, with a workspace of its own."""
    with _only_width(model_runner, width):
        return model_runner._get_attention_backend(init_new_workspace=True)


def capture_graphs(model_runner: Any, backend: Any, width: int) -> Any:
    """The target's decode graphs for one verify width."""
    from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner

    with _only_width(model_runner, width), _decoding(model_runner, plainly=width == 1):
        return CudaGraphRunner(model_runner, attn_backend=backend, speculative_num_draft_tokens=width)


def replay_of(runner: Any, batch_size: int) -> Callable[[], None]:
    """A call that replays the graph of one batch size, on whatever its buffers hold."""

    def replay() -> None:
        runner.graphs[runner._make_graph_key(batch_size)].replay()

    return replay


@contextmanager
def _only_width(model_runner: Any, width: int) -> Iterator[None]:
    """Where a backend or graphs are built: there the target's only width is this one."""
    server_args = model_runner.server_args
    kept, workspace = server_args.speculative_num_draft_tokens, getattr(model_runner, "init_new_workspace", False)
    server_args.speculative_num_draft_tokens = width
    try:
        yield
    finally:
        server_args.speculative_num_draft_tokens = kept
        model_runner.init_new_workspace = workspace


@contextmanager
def _decoding(model_runner: Any, *, plainly: bool) -> Iterator[None]:
    """Where graphs are captured: those of plain decoding, which keep the hidden states that the drafter reads."""
    if not plainly:
        yield
        return
    algorithm, server_args = model_runner.spec_algorithm, model_runner.server_args
    returning = server_args.enable_return_hidden_states
    model_runner.spec_algorithm, server_args.enable_return_hidden_states = SpeculativeAlgorithm.NONE, True
    try:
        yield
    finally:
        model_runner.spec_algorithm, server_args.enable_return_hidden_states = algorithm, returning
