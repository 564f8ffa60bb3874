# SPDX-License-Identifier: Apache-2.0
"""What a lane is made of in the releases of the second worker that read the width from the arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner


#: The model runner's attribute that holds its decode graphs.
RUNNER = "decode_cuda_graph_runner"

#: Whether a step can verify the root alone, without a draft: plain decoding.
DECODES_PLAINLY = False


def build_backend(model_runner: Any, width: int) -> Any:
    """The target's attention backend for one verify width, with a workspace of its own."""
    with _only_width(model_runner, width):
        return model_runner._get_attention_backend(init_new_workspace=True)


def capture_graphs(model_runner: Any, backend: Any, width: int) -> Any:
    """The target's decode graphs for one verify width."""
    with _only_width(model_runner, width):
        return DecodeCudaGraphRunner(model_runner, attn_backend=backend, speculative_num_draft_tokens=width)


def replay_of(runner: Any, batch_size: int) -> Callable[[], None]:
    """A call that replays the graph of one batch size, on whatever its buffers hold."""

    def replay() -> None:
        runner.backend.replay(runner._make_graph_key(batch_size), None)

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
