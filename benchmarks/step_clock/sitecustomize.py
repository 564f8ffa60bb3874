# SPDX-License-Identifier: Apache-2.0
"""When each step of an engine was done, seen from inside its scheduler; the same for every algorithm.

Put this folder on PYTHONPATH and name a file in `DECODE_CLOCK`. Behind every `Scheduler.process_batch_result` there is
one record: the batch's first request id, the time, `d` for a decode step and `p` for anything else, the output tokens
of each request so far, and how many requests are finished. Records wait in memory while requests run. They are written
when one has finished, or when all have got as many tokens behind their first decode step as their ids say between
slashes. A record takes
some microseconds.

With `DECODE_DFLASH_STAGES` the forwards of a DFLASH engine are marked as stages of its steps (the overlay's `stages`,
whose worker marks DDTREE's): draft, verify, and all between as the rest.
"""

import importlib.abc
import importlib.machinery
import json
import os
import runpy
import sys
import time
from pathlib import Path


SCHEDULER, RUNNER = "sglang.srt.managers.scheduler", "sglang.srt.model_executor.model_runner"


def watch(module, target):
    """Wrap `Scheduler.process_batch_result`."""
    plain, waiting, begun, told = module.Scheduler.process_batch_result, [], {}, set()

    def process_batch_result(self, batch, result, *args, **kwargs):
        reqs = list(batch.reqs or [])
        kind = "d" if batch.forward_mode.is_decode() else "p"
        given = plain(self, batch, result, *args, **kwargs)
        finished = sum(req.finished() for req in reqs)
        enough = False
        if reqs:
            tokens = [len(req.output_ids) for req in reqs]
            waiting.append([reqs[0].rid, time.perf_counter(), kind, tokens, finished])
            name, *wanted = reqs[0].rid.split("/")
            if kind == "d" and len(wanted) == 2 and name not in told:
                if len(begun.get(name, ())) != len(tokens):
                    begun.clear()
                    begun[name] = tokens
                enough = all(now - then >= int(wanted[0]) for now, then in zip(tokens, begun[name], strict=True))
            if enough:
                told.add(name)
        if finished or enough or len(waiting) > 1000:
            with open(target, "a") as out:
                out.write("".join(json.dumps(record) + "\n" for record in waiting) + json.dumps(peak()) + "\n")
            waiting.clear()
        return given

    module.Scheduler.process_batch_result = process_batch_result


def peak():
    """The most device memory that this process has held, in bytes: tensors, and what PyTorch keeps for them."""
    import torch

    if not torch.cuda.is_initialized():
        return {"allocated": 0, "reserved": 0}
    return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


def mark_forwards(module):
    """Wrap `ModelRunner.forward` of the target and of the drafter."""
    plain = module.ModelRunner.forward

    def forward(self, forward_batch, *args, **kwargs):
        from sglang.srt.speculative.ddtree import stages

        if self.is_draft_worker:
            stages.mark(stages.DRAFT, batch=forward_batch.batch_size)
        elif forward_batch.forward_mode.is_target_verify():
            stages.mark(stages.VERIFY, width=forward_batch.input_ids.shape[0] // max(forward_batch.batch_size, 1))
        else:
            stages.interrupt()
        given = plain(self, forward_batch, *args, **kwargs)
        stages.mark(stages.REST)
        return given

    module.ModelRunner.forward = forward


class AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads a module as usual and changes it then."""

    def __init__(self, module, change):
        self._module, self._change, self._busy = module, change, False

    def find_spec(self, name, path=None, target=None):
        if name != self._module or self._busy:
            return None
        self._busy = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._busy = False
        self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)
        self._change(module)


if os.environ.get("DECODE_CLOCK"):
    import importlib.util

    sys.meta_path.insert(0, AfterImport(SCHEDULER, lambda module: watch(module, os.environ["DECODE_CLOCK"])))
    if os.environ.get("DECODE_DFLASH_STAGES"):
        sys.meta_path.insert(0, AfterImport(RUNNER, mark_forwards))

# Python imports one sitecustomize; another one on the path gets its turn here.
_here = Path(__file__).resolve().parent
for _folder in sys.path:
    _other = Path(_folder or ".") / "sitecustomize.py"
    if _other.exists() and _other.resolve().parent != _here:
        runpy.run_path(str(_other), run_name="sitecustomize")
        break
