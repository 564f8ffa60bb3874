# SPDX-License-Identifier: Apache-2.0
"""What is known of the target's model before it is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.arg_groups.overrides import model_config_of, use_mla_backend


if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


def model_config(server_args: ServerArgs) -> Any:
    """The target's `ModelConfig`."""
    return model_config_of(server_args)


def uses_mla(server_args: ServerArgs) -> bool:
    """Whether the target is an MLA model."""
    return bool(use_mla_backend(server_args))
