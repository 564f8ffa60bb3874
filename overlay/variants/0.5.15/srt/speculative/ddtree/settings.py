# SPDX-License-Identifier: Apache-2.0
"""How the arguments are read and set while SGLang completes them.

These releases set some of them by declarations, which are applied at the end: until then only a view shows them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.arg_groups.overrides import resolved_view


if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


def reading(server_args: ServerArgs) -> Any:
    """What to read the arguments from, while they are being completed and after."""
    return resolved_view(server_args)


def settle(server_args: ServerArgs, **values: Any) -> None:
    """Set arguments while they are being completed."""
    for name, value in values.items():
        setattr(server_args, name, value)
