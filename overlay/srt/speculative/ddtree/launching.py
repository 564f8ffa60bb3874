# SPDX-License-Identifier: Apache-2.0
"""Kernel launches that cost the host little: a step has about ten of them, beside a GPU that may wait for each.

Triton looks at every argument of every launch to find the kernel compiled for its like. A caller who knows what it
compiles by asks by that, and launches the compiled kernel itself.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import Any

import torch


logger = logging.getLogger(__name__)

#: What kernels that look at a whole batch are compiled for at least: a variant more for each small size would be one
#: more to compile, and saves nothing.
LEAST_REQUESTS = 64

_compiled: dict[tuple[Hashable, ...], Any] = {}
#: Whether requests wait while a kernel is compiled; one entry.
_serving = [False]


def begin_serving() -> None:
    """Say that every kernel has been launched that should be: from here on a variant that is compiled is logged."""
    _serving[0] = True


def compiled_kernels() -> int:
    """Variants that were launched so far on a GPU."""
    return len(_compiled)


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    args: tuple[Any, ...],
    constants: dict[str, Any],
    *,
    num_warps: int,
    num_stages: int | None = None,
    key: Any = (),
) -> None:
    """Launch a Triton kernel on the current stream.

    Args:
        kernel: A jitted function whose constexpr parameters come last.
        grid: Programs along each axis.
        args: The other arguments, in order.
        constants: The constexpr arguments, in order.
        num_warps: Warps of a program.
        num_stages: Of software pipelining; None for Triton's own choice.
        key: What else the kernel is compiled by: types of tensors that vary, arguments that may be None, numbers that
            it does specialise on. Two launches of one key and the same constants must need the same code.
    """
    device = torch.cuda.current_device() if args[0].is_cuda else -1
    full_key = (id(kernel), device, num_warps, key, *constants.values())
    compiled = _compiled.get(full_key)
    if compiled is not None:
        compiled[grid](*args, *constants.values())
        return
    if device >= 0 and _serving[0]:
        logger.warning("DDTREE: compiling %s while serving: %s %s", kernel.__name__, key, constants)
    stages = {} if num_stages is None else {"num_stages": num_stages}
    compiled = kernel[grid](*args, **constants, num_warps=num_warps, **stages)
    if device >= 0:
        _compiled[full_key] = compiled
