# SPDX-License-Identifier: Apache-2.0
"""How the arguments are read and set while SGLang completes them: as plain attributes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


def reading(server_args: ServerArgs) -> Any:
    """What to read the arguments from, while they are being completed and after."""
    return server_args


def settle(server_args: ServerArgs, **values: Any) -> None:
    """Set arguments while they are being completed."""
    for name, value in values.items():
        setattr(server_args, name, value)
