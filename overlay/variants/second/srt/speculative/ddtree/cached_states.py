# SPDX-License-Identifier: Apache-2.0
"""How recurrent states are kept for the prefix cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.speculative.ddtree.settings import reading


if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


def recurrent_strategy(server_args: ServerArgs) -> str:
    """How recurrent states are kept for the prefix cache."""
    return str(reading(server_args).mamba_radix_cache_strategy)
