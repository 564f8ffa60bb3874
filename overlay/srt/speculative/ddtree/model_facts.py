# SPDX-License-Identifier: Apache-2.0
"""What is known of the target's model before it is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


def model_config(server_args: ServerArgs) -> Any:
    """The target's `ModelConfig`."""
    return server_args.get_model_config()


def uses_mla(server_args: ServerArgs) -> bool:
    """Whether the target is an MLA model."""
    return bool(server_args.use_mla_backend())
