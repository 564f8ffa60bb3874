# SPDX-License-Identifier: Apache-2.0
"""Where the draft is built: which widths its backends and graphs read there."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.ddtree.args import draft_width


def draft_scope() -> AbstractContextManager[Any]:
    """Where the draft is built, with its backends and graphs: there the only width is the block."""
    width = draft_width()
    return get_spec().override(
        speculative_num_draft_tokens=width, speculative_eagle_topk=1, max_speculative_num_draft_tokens=width
    )
