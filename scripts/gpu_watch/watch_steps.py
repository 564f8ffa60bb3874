# SPDX-License-Identifier: Apache-2.0
"""What a decode step asks of the host: synchronisations, which end the engine, and operations, which are counted.

`Guard` puts PyTorch into the mode in which waiting for the device is an error: in the second worker from the drafter's
hidden states to the end of the step; in the first one to the launch of the target's forward, and from the acceptance to
the one wait for its report, which is an event's and no error. `Counter` counts what a step launches one by one:
PyTorch's operations but for views, and Triton kernels; a model's forward counts as nothing.
"""

import functools
import json

import torch
from torch.utils._python_dispatch import TorchDispatchMode


#: Ours that are one launch on a GPU, or as many as it says; their tensor forms on a CPU are not counted.
LAUNCHES = {
    "captured_head": {"draft_rows": 1},
    "tree": {"build_tree": 1},
    "tree_mask": {"write_tree_mask": 1},
    "slots": {"verify_slots": 1},
    "accept": {"accept": 1},
    "kv_move": {"move_to_front": 1},
    "draft_slots": {"draft_slots": 1},
    "placing": {"place": 1},
    "calibration": {"update_by_tensors": 1},
}
HEAD_LAUNCHES = 3


class Guard:
    """The mode in which a wait is an error, for as long as a step has none to make; a line a step in `target`."""

    def __init__(self, target):
        self.target, self.steps, self.planted = target, 0, None

    def begin(self):
        self.forbid()
        if self.planted is None:
            try:
                torch.zeros(1, device="cuda").item()
                self.planted = "not seen"
            except RuntimeError:
                self.planted = "seen"

    def forbid(self):
        torch.cuda.set_sync_debug_mode("error")

    def allow(self):
        torch.cuda.set_sync_debug_mode("default")

    def end(self, graph, batch):
        self.allow()
        self.steps += 1
        with open(self.target, "a") as out:
            line = {"steps": self.steps, "planted": self.planted, "graph": bool(graph), "batch": batch}
            out.write(json.dumps(line) + "\n")


def guard_second(worker, guard):
    """From the drafter's hidden states to the end of the step."""
    verify_tree = worker._verify_tree

    @functools.wraps(verify_tree)
    def whole(self, batch, **kwargs):
        guard.begin()
        result = verify_tree(self, batch, **kwargs)
        guard.end(result.can_run_cuda_graph, len(batch.reqs))
        return result

    worker._verify_tree = whole


def guard_first(worker, guard, verify_input):
    """From the drafter's hidden states to the launch of the target's forward; from the logits to the one wait."""
    prepare, step = worker._prepare_tree_verify, worker.forward_batch_generation
    verify, commit = verify_input.verify, verify_input._commit

    @functools.wraps(prepare)
    def from_hidden(self, batch, **kwargs):
        guard.begin()
        prepare(self, batch, **kwargs)

    def launching(forward):
        @functools.wraps(forward)
        def launched(*args, **kwargs):
            result = forward(*args, **kwargs)
            if kwargs.get("is_verify"):
                guard.end(result.can_run_cuda_graph, len(args[0].seq_lens))
            return result

        return launched

    @functools.wraps(step)
    def to_launch(self, batch, **kwargs):
        target_worker = self.target_worker
        if not hasattr(target_worker, "guarded"):
            target_worker.forward_batch_generation = launching(target_worker.forward_batch_generation)
            target_worker.guarded = True
        return step(self, batch, **kwargs)

    @functools.wraps(verify)
    def from_logits(self, **kwargs):
        guard.forbid()
        return verify(self, **kwargs)

    @functools.wraps(commit)
    def to_report(self, *args):
        guard.allow()
        return commit(self, *args)

    worker._prepare_tree_verify, worker.forward_batch_generation = from_hidden, to_launch
    verify_input.verify, verify_input._commit = from_logits, to_report


class Counter(TorchDispatchMode):
    """Names of the operations of a step; `paused` where something counts as a whole."""

    def __init__(self):
        super().__init__()
        self.names, self.paused = {}, 0

    def add(self, name, count=1):
        if not self.paused:
            self.names[name] = self.names.get(name, 0) + count

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view and not str(function).startswith(("aten.empty", "aten.new_empty", "aten.empty_like")):
            self.add(str(function))
        return function(*args, **(kwargs or {}))


COUNTERS = []
#: Operations with which the scheduler has reserved slots for the next step.
RESERVED = []


def as_a_whole(function, name, count):
    """`function`, whose operations are not counted; itself it counts `count`."""

    @functools.wraps(function)
    def whole(*args, **kwargs):
        for counter in COUNTERS:
            counter.add(name, count)
            counter.paused += 1
        try:
            return function(*args, **kwargs)
        finally:
            for counter in COUNTERS:
                counter.paused -= 1

    return whole


def count_worker(module, target):
    """Wrap a worker of DFLASH, which DDTREE's inherits: a JSON line a decode step."""
    name = "DFlashWorkerV2" if hasattr(module, "DFlashWorkerV2") else "DFlashWorker"
    step = getattr(module, name).forward_batch_generation

    @functools.wraps(step)
    def counted(self, batch, *args, **kwargs):
        if batch.forward_mode.is_extend() or batch.forward_mode.is_idle():
            return step(self, batch, *args, **kwargs)
        requests = len(batch.seq_lens)
        with Counter() as counter:
            COUNTERS.append(counter)
            try:
                return step(self, batch, *args, **kwargs)
            finally:
                COUNTERS.pop()
                with open(target, "a") as out:
                    line = {"batch": requests, "operations": sum(counter.names.values()), "names": counter.names}
                    out.write(json.dumps(line | {"reserved": RESERVED.pop() if RESERVED else 0}) + "\n")

    getattr(module, name).forward_batch_generation = counted


def count_reserve(module):
    """What the scheduler does for a step of the second worker, before it."""
    plain = module.DFlashDraftInputV2.prepare_for_decode

    @functools.wraps(plain)
    def reserve(self, batch):
        with Counter() as counter:
            plain(self, batch)
        RESERVED[:] = [sum(counter.names.values())]

    module.DFlashDraftInputV2.prepare_for_decode = reserve


def count_forward(module):
    module.ModelRunner.forward = as_a_whole(module.ModelRunner.forward, "a model's forward", 0)


def count_kernels(module):
    """Triton's own launches, on a GPU."""
    module.JITFunction.run = as_a_whole(module.JITFunction.run, "a Triton kernel", 1)


def count_launches(module):
    """The overlay's own way of launching Triton kernels."""
    module.launch = as_a_whole(module.launch, "a kernel of the overlay", 1)


def count_ours(module):
    """The overlay's functions that are launches, on a CPU."""
    own = module.__name__.rpartition(".")[2]
    if torch.cuda.is_available():
        return
    for name, count in LAUNCHES.get(own, {}).items():
        setattr(module, name, as_a_whole(getattr(module, name), name, count))
    if own == "draft_head":
        head = module.DraftHead
        head.top_log_probs = as_a_whole(head.top_log_probs, "top_log_probs", HEAD_LAUNCHES)


def hook(module, guarded, counted):
    """What there is to do once a module has been executed; `guarded` and `counted` are the files, or None."""
    own = module.__name__.rpartition(".")[2]
    if guarded and own == "worker":
        worker, guard = module.DDTreeWorker, Guard(guarded)
        if hasattr(worker, "_verify_tree"):
            guard_second(worker, guard)
        else:
            guard_first(worker, guard, module.DDTreeVerifyInput)
    if not counted:
        return
    if own.startswith("dflash_worker"):
        count_worker(module, counted)
    elif own == "dflash_info_v2":
        count_reserve(module)
    elif own == "model_runner":
        count_forward(module)
    elif own == "jit":
        count_kernels(module)
    elif own == "launching":
        count_launches(module)
    elif own != "worker":
        count_ours(module)
