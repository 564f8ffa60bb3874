# SPDX-License-Identifier: Apache-2.0
"""Where the draft is built: which widths its backends and graphs read there."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any


def draft_scope() -> AbstractContextManager[Any]:
    """Where the draft is built, with its backends and graphs: they read its own arguments."""
    return nullcontext()
