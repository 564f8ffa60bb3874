# SPDX-License-Identifier: Apache-2.0
"""The arguments of this process, once they are complete."""

from __future__ import annotations

from typing import Any


def spec() -> Any:
    """The speculative arguments of this process, once they are complete."""
    from sglang.srt.server_args import get_global_server_args

    return get_global_server_args()


def schedule() -> Any:
    """The arguments about how many requests run, once they are complete."""
    from sglang.srt.server_args import get_global_server_args

    return get_global_server_args()


def serving() -> Any:
    """The arguments about what is served under which name, once they are complete."""
    from sglang.srt.server_args import get_global_server_args

    return get_global_server_args()


def observability() -> Any:
    """The arguments about logs and metrics, once they are complete."""
    from sglang.srt.server_args import get_global_server_args

    return get_global_server_args()
