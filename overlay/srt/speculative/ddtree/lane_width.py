# SPDX-License-Identifier: Apache-2.0
"""Where a lane is built: there the target's only verify width is its own. Most releases read it from the arguments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def only_width(model_runner: Any, width: int) -> Iterator[None]:
    """Where a backend or graphs are built: there the target's only width is this one."""
    server_args = model_runner.server_args
    kept, workspace = server_args.speculative_num_draft_tokens, getattr(model_runner, "init_new_workspace", False)
    server_args.speculative_num_draft_tokens = width
    try:
        yield
    finally:
        server_args.speculative_num_draft_tokens = kept
        model_runner.init_new_workspace = workspace
