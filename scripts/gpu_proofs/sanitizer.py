# SPDX-License-Identifier: Apache-2.0
"""compute-sanitizer over the overlay's kernels and over a short engine run."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from gpu_proofs.calls import greedy, prompts
from gpu_proofs.checks import Part
from gpu_proofs.engines import SCRIPTS, Arm


#: Calls of CUDA's API that fail are no memory errors: PyTorch and SGLang ask for what may be missing.
MEMCHECK = (
    *("--tool", "memcheck", "--target-processes", "all", "--error-exitcode", "86"),
    *("--report-api-errors", "no"),
)
ERRORS = re.compile(r"^=+ (?:Invalid|Misaligned|Out-of-range|Stack overflow|Illegal) .*", re.MULTILINE)
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error")
#: In an engine only these kernels are watched, else its start takes longer than the whole run may: the tree, the KV
#: move, and SGLang's attention over the mask that the overlay writes.
WATCHED = ("_grow_kernel", "_move_kernel", "_fwd_kernel")
#: Writes where nothing is, by a kernel with the name of a watched one, in a child process that is then killed: so end
#: the processes of an engine.
PLANTED = """
import os, signal, subprocess, sys
import torch, triton, triton.language as tl


@triton.jit
def _move_kernel(x):
    tl.store(x + tl.arange(0, 64) + (1 << 26), tl.arange(0, 64))


if sys.argv[1:]:
    try:
        _move_kernel[(1,)](torch.zeros(64, dtype=torch.int32, device="cuda"))
        torch.cuda.synchronize()
    finally:
        os.kill(os.getpid(), signal.SIGKILL)
subprocess.run([sys.executable, __file__, "child"])
"""


def find_tool() -> str | None:
    """compute-sanitizer, which a CUDA toolkit need not put on PATH."""
    return shutil.which("compute-sanitizer") or next(
        (str(path) for path in sorted(Path("/usr/local").glob("cuda*/bin/compute-sanitizer"))), None
    )


def useless(part: Part, wrapper: list[str]) -> str:
    """Why this way of calling the tool is no use here; empty when it finds a planted error."""
    file = part.machine.workdir / "planted.py"
    file.write_text(PLANTED)
    log = file.with_suffix(".log")
    code = part.command([*wrapper, part.options.python, str(file)], log)
    said = log.read_text(errors="replace")
    if ERRORS.search(said):
        return ""
    return f"a planted error is not seen (exit {code}): " + " / ".join(said.strip().splitlines()[:4])[:400]


def part_sanitizer(part: Part) -> None:
    """The overlay's kernels on their own, all kernels watched, beside an engine with three prompts, ours watched."""
    tool = None if part.options.cpu else find_tool()
    every = [tool, *MEMCHECK] if tool else []
    wrapper = every + [word for name in WATCHED for word in ("--kernel-name", f"kns={name}")]
    why = useless(part, wrapper) if tool else "it is not on this machine"
    names = ", ".join(WATCHED)
    if tool and why:
        part.machine.say(f"compute-sanitizer with a choice of kernels: {why}")
        wrapper, names, why = every, "every kernel", useless(part, every)
    engine = None if why else sanitized_engine(part, wrapper)
    log = part.machine.workdir / "sanitizer-kernels.log"
    command = [*([] if why else every), part.options.python, str(SCRIPTS / "gpu_kernels")]
    # Without PyTorch's cache each tensor is an allocation of its own, so that a write beside it is seen.
    code = part.command(command, log, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    how = f"without compute-sanitizer: {why}" if why else "under compute-sanitizer, every kernel"
    if code:
        sys.stdout.write(log.read_text(errors="replace")[-2000:])
    passed = None if code is None else code == 0
    part.check("the overlay's kernels equal their tensor forms", passed, f"exit {code}, {how}")
    if not engine:
        part.check("compute-sanitizer over an engine", None, why)
        return
    result = part.done(engine)
    if result:
        said = engine.log.read_text(errors="replace")
        errors = ERRORS.findall(said) + [f"{count} errors" for count in SUMMARY.findall(said) if int(count)]
        decoded = sum(len(ids) for call in result["calls"] for ids in call["output_ids"])
        figures = f"{names}; {decoded} tokens; {len(errors)} errors {errors[:3] or ''}, exit {result['returncode']}"
        part.check("compute-sanitizer over an engine", not errors and decoded == 32, figures)


def sanitized_engine(part: Part, wrapper: list[str]) -> Arm:
    """One request in a replayed graph, then three at once, which are more than any captured batch."""
    small = {"cuda_graph_bs": [1, 2], "cuda_graph_max_bs": 2, "max_running_requests": 4, "page_size": 16}
    small["watchdog_timeout"] = 3600  # a step takes as long as it takes
    some = prompts(part.options, 8)[2:8:2]
    calls = [greedy(some[:1], 8), greedy(some, 8)]
    return part.engine("engine", calls, wrapper=wrapper, **part.drafting("DDTREE"), **small)
