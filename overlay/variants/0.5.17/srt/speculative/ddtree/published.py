# SPDX-License-Identifier: Apache-2.0
"""The arguments of this process, once they are complete."""

from __future__ import annotations

from typing import Any


def spec() -> Any:
    """The speculative arguments of this process, once they are complete."""
    from sglang.srt.runtime_context import get_spec

    return get_spec()


def schedule() -> Any:
    """The arguments about how many requests run, once they are complete."""
    from sglang.srt.runtime_context import get_schedule

    return get_schedule()


def serving() -> Any:
    """The arguments about what is served under which name, once they are complete."""
    from sglang.srt.runtime_context import get_serving

    return get_serving()


def observability() -> Any:
    """The arguments about logs and metrics, once they are complete."""
    from sglang.srt.runtime_context import get_observability

    return get_observability()
