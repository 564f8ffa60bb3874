# SPDX-License-Identifier: Apache-2.0
"""How the arguments are read and set while SGLang completes them: in these releases they are plain attributes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

#: Backends whose TARGET_VERIFY honours an ancestor mask, as shown by the overlay's own tests. The first is the default.
TREE_ATTENTION_BACKENDS = ("triton", "flashinfer", "fa3")

#: Whether a whole engine with recurrent layers was seen to agree with plain decoding on a GPU.
RECURRENT_LAYERS_RAN = True


def reading(server_args: ServerArgs) -> Any:
    """What to read the arguments from while they are being completed."""
    return server_args


def settle(server_args: ServerArgs, **values: Any) -> None:
    """Set arguments while they are being completed."""
    for name, value in values.items():
        setattr(server_args, name, value)


def recurrent_strategy(server_args: ServerArgs) -> str:
    """How recurrent states are kept for the prefix cache."""
    return str(reading(server_args).mamba_scheduler_strategy)


def model_config(server_args: ServerArgs) -> Any:
    """The target's `ModelConfig`."""
    return server_args.get_model_config()


def uses_mla(server_args: ServerArgs) -> bool:
    """Whether the target is an MLA model."""
    return bool(server_args.use_mla_backend())


def spec() -> Any:
    """The speculative arguments of this process, once they are complete."""
    from sglang.srt.server_args import get_global_server_args

    return get_global_server_args()


def schedule() -> Any:
    """The arguments about how many requests run, once they are complete."""
    from sglang.srt.server_args import get_global_server_args

    return get_global_server_args()
