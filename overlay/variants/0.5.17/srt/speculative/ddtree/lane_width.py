# SPDX-License-Identifier: Apache-2.0
"""Where a lane is built: there the target's only verify width is its own. Read from what is published."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.runtime_context import get_spec


@contextmanager
def only_width(model_runner: Any, width: int) -> Iterator[None]:
    """Where a backend or graphs are built: there the target's only width is this one."""
    workspace = getattr(model_runner, "init_new_workspace", False)
    try:
        with get_spec().override(speculative_num_draft_tokens=width):
            yield
    finally:
        model_runner.init_new_workspace = workspace
