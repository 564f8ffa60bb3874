# SPDX-License-Identifier: Apache-2.0
"""The arguments that the draft worker is built from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.speculative.ddtree.args import draft_view


if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


def draft_arguments(server_args: ServerArgs) -> ServerArgs:
    """The arguments that the draft worker is built from."""
    return draft_view(server_args)
