# SPDX-License-Identifier: Apache-2.0
"""Compile every launch of `kernel_launches` for GPUs that need not be there, and print a line of JSON for each.

Run by `test_kernels_compile` in a process of its own, with the overlay in its path: Triton decides when it is imported
whether it compiles or interprets. What a launch is compiled for is left to Triton itself, so that its arguments are
specialised as on a GPU.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction


#: Shared memory that a program may have, by compute capability: that of the H100, for which all is compiled, and of the
#: A100 and two generations of GPUs for desktops ("Maximum amount of shared memory per thread block" in CUDA's guide).
SHARED_BYTES = {90: 227 << 10, 80: 163 << 10, 86: 99 << 10, 120: 99 << 10}
#: What is compiled for the others too: what multiplies matrices or keeps much at hand.
EVERYWHERE = ("attention_kernel", "head_kernel", "head_merge_kernel", "tree_kernel")
PROCESSES = 2

#: A kernel, and the arguments and options of one launch.
Launch = tuple[JITFunction, tuple[Any, ...], dict[str, Any]]

#: Launches and the capabilities that they are compiled for; forked processes have them, and are sent their numbers.
_jobs: list[tuple[Launch, int]] = []


class Driver:
    """Tells Triton that the GPU has some compute capability; each is a device with kernels of its own."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, _: int) -> int:
        return 0


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Note launches instead of launching."""
    found: list[Launch] = []

    def note(kernel: JITFunction, *args: Any, **options: Any) -> None:
        found.append((kernel, args, options))

    run = JITFunction.run
    JITFunction.run = note
    try:
        yield found
    finally:
        JITFunction.run = run


def module_of(kernel: JITFunction) -> str:
    return kernel.__module__.rpartition(".")[2]


def compile_job(number: int) -> dict[str, Any]:
    """What became of a launch: the bytes of its shared memory, or what Triton or `ptxas` said."""
    (kernel, args, options), capability = _jobs[number]
    types = ", ".join(str(arg.dtype).removeprefix("torch.") for arg in args if isinstance(arg, torch.Tensor))
    told = {"kernel": f"{module_of(kernel)}.{kernel.__name__}", "allowed": SHARED_BYTES[capability]}
    told["launch"] = f"{told['kernel']} for sm_{capability}, {options}, of {types}"
    # Of a crash of the compiler the last of these lines tells.
    sys.stderr.write(f"compiling {told['launch']}\n")
    sys.stderr.flush()
    triton.runtime.driver.set_active(Driver(capability))
    try:
        compiled = kernel.run(*args, **options | {"grid": None, "warmup": True})
    except Exception as error:
        return told | {"error": f"{type(error).__name__}: {error}"}
    assert compiled.asm["cubin"]
    return told | {"shared": compiled.metadata.shared}


def main() -> None:
    with recorded() as launches:
        from kernel_launches import launch_all

        launch_all()
    for capability in SHARED_BYTES:
        _jobs.extend((it, capability) for it in launches if capability == 90 or module_of(it[0]) in EVERYWHERE)
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("fork")) as processes:
        for told in processes.map(compile_job, range(len(_jobs))):
            sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
