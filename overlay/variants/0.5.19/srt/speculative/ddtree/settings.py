# SPDX-License-Identifier: Apache-2.0
"""How the arguments are read and set while SGLang completes them.

In these releases `ServerArgs` stays as the user wrote it. Everything that is set is declared; a view shows it while the
arguments are being completed, and the namespaces that are published afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.arg_groups.overrides import declare_resolution, model_config_of, resolving_view, use_mla_backend


if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

#: Backends whose TARGET_VERIFY honours an ancestor mask, as shown by the overlay's own tests. The first is the default.
TREE_ATTENTION_BACKENDS = ("triton",)

#: Whether a whole engine with recurrent layers was seen to agree with plain decoding on a GPU.
RECURRENT_LAYERS_RAN = False


def reading(server_args: ServerArgs) -> Any:
    """What to read the arguments from while they are being completed."""
    return resolving_view(server_args)


def settle(server_args: ServerArgs, **values: Any) -> None:
    """Set arguments while they are being completed."""
    declare_resolution(server_args, "ddtree", **values)


def recurrent_strategy(server_args: ServerArgs) -> str:
    """How recurrent states are kept for the prefix cache."""
    return str(reading(server_args).mamba_radix_cache_strategy)


def model_config(server_args: ServerArgs) -> Any:
    """The target's `ModelConfig`."""
    return model_config_of(server_args)


def uses_mla(server_args: ServerArgs) -> bool:
    """Whether the target is an MLA model."""
    return bool(use_mla_backend(server_args))


def spec() -> Any:
    """The speculative arguments of this process, once they are complete."""
    from sglang.srt.runtime_context import get_spec

    return get_spec()


def schedule() -> Any:
    """The arguments about how many requests run, once they are complete."""
    from sglang.srt.runtime_context import get_schedule

    return get_schedule()
