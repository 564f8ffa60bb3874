# SPDX-License-Identifier: Apache-2.0
"""Python's cycle collector, paused while large syntax trees are built: they hold no cycles, and it visits all of it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """No cycle is looked for inside the block; what has no references left is freed as ever."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
