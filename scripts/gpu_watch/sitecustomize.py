# SPDX-License-Identifier: Apache-2.0
"""A second opinion on every tree verify of an engine, for `scripts/gpu_prove`.

Put this folder on PYTHONPATH. With a file in `DDTREE_RANKS`, every tree and every acceptance is hashed on each
tensor-parallel rank, and the first rank writes down where the ranks differ. With one in `DDTREE_WATCH`, each verify
forward of the target is run twice more on the same slots, and a JSON line says what came out. First with another token
at one node of each tree (so that its keys and values change in every layer): exactly the nodes that see it may give
other numbers. Then with the first inputs again and without the CUDA graph: how far are the two apart?
`DDTREE_GUARD` and `DDTREE_COUNT` name files of `watch_steps`.
"""

import importlib.abc
import json
import os
import random
import runpy
import sys


def watch(module, target):
    """Wrap `ModelRunner._forward_raw`, which decides whether a graph is replayed."""
    plain, dice = module.ModelRunner._forward_raw, random.Random(0)  # noqa: S311  (nodes, not secrets)

    def _forward_raw(self, forward_batch, *args, **kwargs):
        if self.is_draft_worker or not forward_batch.forward_mode.is_target_verify():
            given = plain(self, forward_batch, *args, **kwargs)
            if not self.is_draft_worker and forward_batch.forward_mode.is_decode():
                # A step that drafts nothing: plain decoding's own forward, which texts are compared with.
                with open(target, "a") as out:
                    out.write(json.dumps({"graph": bool(given.can_run_graph), "width": 1}) + "\n")
            return given
        # A verify shifts the convolution windows of recurrent layers in place.
        windows = [(window, window.clone()) for window in recurrent_windows(self)]

        def again():
            for window, before in windows:
                window.copy_(before)
            return plain(self, forward_batch, *args, **kwargs)

        given = plain(self, forward_batch, *args, **kwargs)
        logits, hidden = (part.clone() for part in parts(given.logits_output))
        hiding = hide(forward_batch, again, dice, logits, hidden, recurrent=bool(windows))
        runner = "graph_runner" if hasattr(self, "graph_runner") else "decode_cuda_graph_runner"
        graph = getattr(self, runner)
        setattr(self, runner, None)
        try:
            if graph is not None and runner != "graph_runner":
                # The second worker prepared the step before this forward, and for the graph.
                self.attn_backend.init_forward_metadata(forward_batch)
            eager = again()  # last, so that the slots hold the right keys and values
        finally:
            setattr(self, runner, graph)
        with open(target, "a") as out:
            line = compare(forward_batch, logits, hidden, *parts(eager.logits_output))
            out.write(json.dumps({"graph": bool(given.can_run_graph), **line, **hiding}) + "\n")
        given.logits_output.next_token_logits, given.logits_output.hidden_states = logits, hidden
        return given

    module.ModelRunner._forward_raw = _forward_raw


def hide(forward_batch, again, dice, logits, hidden, *, recurrent):
    """Change the token of one node a tree: which rows give other numbers, and which should?

    A row that sees the node must change, or the check could not fail; any other must be the same to the bit. Recurrent
    layers take the root for the parent of padding, which nobody reads: there it counts neither way.
    """
    import torch

    tree = forward_batch.spec_info.tree
    batch, width = tree.tokens.shape
    # Of two drawn nodes the upper one: an inner node more often than a leaf, which nobody else sees.
    nodes = [min(dice.randrange(width), dice.randrange(width)) for _ in range(batch)]
    rows = [request * width + node for request, node in enumerate(nodes)]
    given = forward_batch.input_ids
    forward_batch.input_ids = given.clone()
    forward_batch.input_ids[rows] = (given[rows] + 1 + dice.randrange(logits.shape[1] - 1)) % logits.shape[1]
    try:
        others = parts(again().logits_output)
    finally:
        forward_batch.input_ids = given
    apart = [
        (mine.float() - other.float()).abs().amax(dim=1) for mine, other in zip((logits, hidden), others, strict=True)
    ]
    changed = (apart[0] > 0) | (apart[1] > 0)
    sees = tree.ancestors[list(range(batch)), :, nodes].flatten()
    read = torch.ones_like(sees)
    if recurrent:
        read = ((tree.parents >= 0) | (torch.arange(width, device=sees.device) == 0)).flatten()
    hidden_rows, sees = ~sees & read, sees & read
    leaks = changed & hidden_rows
    return {
        "changed nodes": nodes,
        "changed padding": sum(node > 0 and int(tree.parents[i, node]) < 0 for i, node in enumerate(nodes)),
        "hidden rows": int(hidden_rows.sum()),
        "leaks": int(leaks.sum()),
        "leak": float(torch.maximum(*apart)[leaks].amax()) if leaks.any() else 0.0,
        "seeing rows": int(sees.sum()),
        "blind": int((sees & ~changed).sum()),
    }


def recurrent_windows(model_runner):
    pool = getattr(model_runner.req_to_token_pool, "mamba_pool", None)
    return pool.mamba_cache.conv if pool is not None else []


def parts(output):
    return output.next_token_logits, output.hidden_states


def compare(forward_batch, logits, hidden, eager_logits, eager_hidden):
    """Facts about one step: every row counts, those of padding nodes too."""
    mine, other = logits.argmax(dim=-1), eager_logits.argmax(dim=-1)
    differing = (mine != other).nonzero().flatten()
    # Of two tokens that the runs prefer, how far apart are they for either run?
    gaps = [
        max(abs(float(run[row, mine[row]] - run[row, other[row]])) for run in (logits, eager_logits))
        for row in differing.tolist()
    ]
    return {
        "batch": forward_batch.batch_size,
        "width": forward_batch.spec_info.draft_token_num,
        "rows": logits.shape[0],
        "lengths": forward_batch.seq_lens.tolist(),
        "logits": float((logits.float() - eager_logits.float()).abs().max()),
        "hidden": float((hidden.float() - eager_hidden.float()).abs().max()),
        "gaps": gaps,
        "finite": bool(logits.isfinite().all()) and bool(hidden.isfinite().all()),
    }


def hash_steps(name, function):
    """`function`, with what it returns hashed on every rank and compared by the first."""

    def hashed(*args, **kwargs):
        import torch
        from sglang.srt.distributed import get_tp_group

        found = function(*args, **kwargs)
        group = get_tp_group()
        fields = {field: value for field, value in vars(found).items() if isinstance(value, torch.Tensor)}
        hashes = torch.stack([hash_of(value) for value in fields.values()]).unsqueeze(0)
        every = group.all_gather(hashes, dim=0) if group.world_size > 1 else hashes
        if group.rank_in_group == 0:
            apart = [field for field, column in zip(fields, every.T.tolist(), strict=True) if len(set(column)) > 1]
            with open(os.environ["DDTREE_RANKS"], "a") as out:
                line = {"what": name, "ranks": len(every), "fields": len(fields), "apart": apart}
                out.write(json.dumps(line | {"hash": every[0].sum().item()}) + "\n")
        return found

    return hashed


def hash_of(value):
    """Another number for another content, place by place; int64 []."""
    import torch

    bits = value.contiguous().flatten()
    bits = bits.view(torch.int32) if bits.dtype == torch.float32 else bits
    places = torch.arange(1, bits.numel() + 1, device=bits.device)
    mixed = (bits.to(torch.int64) + 0x9E3779B9) * (places * 0x85EBCA6B + 0xC2B2AE35)
    return (mixed ^ (mixed >> 29)).sum()


def watch_ranks(module, name):
    setattr(module, name, hash_steps(name, getattr(module, name)))


#: Module -> what to do once it has been executed.
HOOKS = {}
if os.environ.get("DDTREE_WATCH"):
    HOOKS["sglang.srt.model_executor.model_runner"] = lambda module: watch(module, os.environ["DDTREE_WATCH"])
if os.environ.get("DDTREE_RANKS"):
    PACKAGE = "sglang.srt.speculative.ddtree"
    HOOKS[f"{PACKAGE}.tree"] = lambda module: watch_ranks(module, "build_tree")
    HOOKS[f"{PACKAGE}.accept"] = lambda module: watch_ranks(module, "accept")


def watch_steps_of(module):
    import watch_steps  # with PyTorch, which must not come before SGLang

    watch_steps.hook(module, os.environ.get("DDTREE_GUARD"), os.environ.get("DDTREE_COUNT"))


if os.environ.get("DDTREE_GUARD") or os.environ.get("DDTREE_COUNT"):
    SPECULATIVE = "sglang.srt.speculative"
    PARTS = (
        "launching",
        "worker",
        "captured_head",
        "draft_head",
        "tree",
        "tree_mask",
        "slots",
        "accept",
        "kv_move",
        "placing",
        "draft_slots",
        "calibration",
    )
    HOOKS |= dict.fromkeys((f"{SPECULATIVE}.ddtree.{name}" for name in PARTS), watch_steps_of)
    UPSTREAM = ("dflash_worker", "dflash_worker_v2", "dflash_info_v2")
    HOOKS |= dict.fromkeys((f"{SPECULATIVE}.{name}" for name in UPSTREAM), watch_steps_of)
    HOOKS |= dict.fromkeys(("sglang.srt.model_executor.model_runner", "triton.runtime.jit"), watch_steps_of)


class AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Runs a module's hook once the module has been executed."""

    def __init__(self):
        self._loaders = {}

    def find_spec(self, name, path=None, target=None):
        if name not in HOOKS or name in self._loaders:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, others), None)
        if spec is None:
            return None
        self._loaders[name], spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return self._loaders[spec.name].create_module(spec)

    def exec_module(self, module):
        self._loaders[module.__spec__.name].exec_module(module)
        HOOKS[module.__spec__.name](module)


if __name__ == "sitecustomize":
    # Python imports one sitecustomize; another one on the path gets its turn here, as the tests' stand-ins on a CPU.
    # It comes first: what this one watches is then what that one has put in its place.
    _here = os.path.dirname(os.path.abspath(__file__))
    for _folder in sys.path:
        _other = os.path.join(_folder or ".", "sitecustomize.py")
        if os.path.exists(_other) and os.path.dirname(os.path.abspath(_other)) != _here:
            runpy.run_path(_other, run_name="another sitecustomize")
            break

if HOOKS:
    sys.meta_path.insert(0, AfterImport())
