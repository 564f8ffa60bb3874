# SPDX-License-Identifier: Apache-2.0
"""How CUDA graphs are captured behind SGLang's own: on their stream, and without the hooks of `--forward-hooks`."""

from __future__ import annotations

import fnmatch
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from sglang.srt.speculative.ddtree.published import observability


@contextmanager
def on_stream(module: ModuleType, stream: Any) -> Iterator[None]:
    """Where a lane's graphs are captured: on the stream that SGLang has captured the widest lane's on.

    Up to 0.5.18 each graph runner captures on a new stream. PyTorch gives a block of a graph pool to the stream that it
    was made for and to no other, so that lanes would share a pool and no memory (sglang#35275). All groups of a
    tensor-parallel engine, and their custom all-reduce, take the stream from the one context.

    Args:
        module: Of SGLang's graph runner, which captures where its `graph_capture` says.
        stream: For captures that name none; from 0.5.19 on SGLang names one that all runners share.
    """
    capture = module.graph_capture

    def capture_on(**given: Any) -> Any:
        return capture(**({"stream": stream} | given))

    module.graph_capture = capture_on
    try:
        yield
    finally:
        module.graph_capture = capture


@contextmanager
def without_forward_hooks(model: Any) -> Iterator[None]:
    """Where graphs are captured: there no hook runs that was asked for by `--forward-hooks`.

    SGLang registers them behind its own capture: recorded operations would run with every replay, on what a hook saw
    while it was captured. What is captured later has to do without them as well.
    """
    patterns = [pattern for hook in observability().forward_hooks or () for pattern in hook.get("target_modules") or ()]
    named = [
        module
        for name, module in (model.named_modules() if patterns else ())
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
    ]
    kept = [(module, module._forward_hooks) for module in named]
    for module in named:
        module._forward_hooks = OrderedDict()
    try:
        yield
    finally:
        for module, hooks in kept:
            module._forward_hooks = hooks
