# SPDX-License-Identifier: Apache-2.0
"""How the arguments are read and set while SGLang completes them.

In these releases `ServerArgs` stays as the user wrote it. Everything that is set is declared; a view shows it while the
arguments are being completed, and the namespaces that are published afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view


if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


def reading(server_args: ServerArgs) -> Any:
    """What to read the arguments from, while they are being completed and after."""
    return resolving_view(server_args)


def settle(server_args: ServerArgs, **values: Any) -> None:
    """Set arguments while they are being completed."""
    declare_resolution(server_args, "ddtree", **values)
