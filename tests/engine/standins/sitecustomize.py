# SPDX-License-Identifier: Apache-2.0
"""What a float32 engine on a CPU needs changed, in every process the engine starts, and the tests' view into DFLASH.

`DDTREE_TEST_KEEP_DTYPE`: SGLang casts a drafter's input embeddings with `.bfloat16()` whatever its dtype; a float32
DFLASH needs them left alone (DDTREE sees to it itself). `DDTREE_TEST_ANY_DEVICE`: newer releases refuse DFLASH on a
CPU, and their worker calls `record_stream`, which a CPU tensor lacks. `DDTREE_TEST_CHAIN_TRACE`: a file that gets a
JSON line per DFLASH verify step with the drafted chain of each request. `DDTREE_TEST_REFERENCE_KERNELS`: torch in place
of a step's Triton kernels (see `reference_kernels`). `DDTREE_TEST_KV_TRACE`: a file that gets a JSON line per request
that leaves the engine, with its text and the KV of every committed token. `DDTREE_TEST_RANK_TRACE`: a file a
tensor-parallel rank with what it verified. `--enable-deterministic-inference` starts without kernels that only a GPU
has. `DDTREE_COUNT`: see `scripts/gpu_watch`. The variables of traces and `DDTREE_TEST_KEEP_DTYPE` are looked up when
they matter, not at import: a forked job brings its own (see `warm_server.py`).
"""

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys


CHAIN_MODULE = "sglang.srt.speculative.dflash_info"


def _trace_chains(module):
    plain = module.DFlashVerifyInput.prepare_for_verify

    def prepare_for_verify(self, batch, page_size, **kwargs):
        target = os.environ.get("DDTREE_TEST_CHAIN_TRACE")
        if target and type(self) is module.DFlashVerifyInput:
            chains = self.draft_token.view(len(batch.reqs), self.draft_token_num).tolist()
            with open(target, "a") as out:
                for req, length, tokens in zip(batch.reqs, batch.seq_lens.tolist(), chains):
                    out.write(json.dumps({"rid": req.rid, "prefix_len": length, "tokens": tokens}) + "\n")
        return plain(self, batch, page_size, **kwargs)

    module.DFlashVerifyInput.prepare_for_verify = prepare_for_verify


def _trace_kv(module):
    import torch

    plain = module.release_kv_cache

    def release_kv_cache(req, tree_cache, *args, **kwargs):
        target = os.environ.get("DDTREE_TEST_KV_TRACE")
        if target and req.req_pool_idx is not None:
            slots = tree_cache.req_to_token_pool.req_to_token[req.req_pool_idx, : req.kv_committed_len].long()
            pool = tree_cache.token_to_kv_pool_allocator.get_kvcache()
            layers = range(pool.start_layer, pool.start_layer + pool.layer_num)
            kv = [buffer[slots].float().flatten(1) for layer in layers for buffer in pool.get_kv_buffer(layer)]
            text = [*req.origin_input_ids, *req.output_ids][: req.kv_committed_len]
            with open(target, "a") as out:
                out.write(json.dumps({"rid": req.rid, "text": text, "kv": torch.cat(kv, dim=1).tolist()}) + "\n")
        return plain(req, tree_cache, *args, **kwargs)

    module.release_kv_cache = release_kv_cache


def _trace_ranks(module):
    """A JSON line a verify step in a file a rank: trees and what came of them. Ranks draw from generators of their own.

    SGLang seeds every rank alike, so that an engine whose ranks draw for themselves can seem to agree.
    """
    import torch

    plain = module.DDTreeVerifyInput.verify

    def verify(self, **words):
        target = os.environ.get("DDTREE_TEST_RANK_TRACE")
        if not target:
            return plain(self, **words)
        rank = torch.distributed.get_rank()
        torch.manual_seed(1_000_000 * (rank + 1) + int(words["batch"].seq_lens_sum))
        current, commit_lens, hidden, accepted = plain(self, **words)
        line = {"trees": self.tree.tokens.tolist(), "parents": self.tree.parents.tolist()}
        line |= {"path": self.path.tolist(), "current": current.tolist(), "committed": commit_lens.tolist()}
        with open(f"{target}.{rank}", "a") as out:
            out.write(json.dumps(line) + "\n")
        return current, commit_lens, hidden, accepted

    module.DDTreeVerifyInput.verify = verify


def _without_batch_invariant_kernels(module):
    """`--enable-deterministic-inference` replaces a GPU's matrix products; a CPU has nothing to replace."""
    module.enable_batch_invariant_mode = lambda: None


class _AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Runs a change once the module that it is for has been executed."""

    def __init__(self, target, change):
        self._target = target
        self._change = change

    def find_spec(self, name, path=None, target=None):
        if name != self._target:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)
        self._change(module)


def _view_into(target, variable, wrap):
    """Wrap a function of a module; a release without it matters only where the variable asks for it."""

    def change(module):
        try:
            wrap(module)
        except AttributeError:
            if os.environ.get(variable):
                raise

    sys.meta_path.insert(0, _AfterImport(target, change))


try:
    import torch
except ImportError:
    pass
else:
    _bfloat16 = torch.Tensor.bfloat16
    torch.Tensor.bfloat16 = lambda self: self if os.environ.get("DDTREE_TEST_KEEP_DTYPE") else _bfloat16(self)

_view_into(CHAIN_MODULE, "DDTREE_TEST_CHAIN_TRACE", _trace_chains)
_view_into("sglang.srt.mem_cache.common", "DDTREE_TEST_KV_TRACE", _trace_kv)
_view_into("sglang.srt.speculative.ddtree.verify_input", "DDTREE_TEST_RANK_TRACE", _trace_ranks)

if os.environ.get("DDTREE_TEST_ANY_DEVICE"):

    class _OnCuda:
        """A view of the arguments that names another device."""

        device = "cuda"

        def __init__(self, view):
            self._view = view

        def __getattr__(self, name):
            return getattr(self._view, name)

    def _any_device(module):
        plain, view = module._handle_dflash, getattr(module, "resolving_view", None)

        def handle_dflash(server_args):
            device = server_args.device
            if view is None:
                object.__setattr__(server_args, "device", "cuda")
            else:
                module.resolving_view = lambda args: _OnCuda(view(args))
            try:
                plain(server_args)
            finally:
                if view is None:
                    object.__setattr__(server_args, "device", device)
                else:
                    module.resolving_view = view

        module._handle_dflash = handle_dflash

    sys.meta_path.insert(0, _AfterImport("sglang.srt.arg_groups.speculative_hook", _any_device))

    def _stay(module):
        module.torch.Tensor.record_stream = lambda self, stream: None

    sys.meta_path.insert(0, _AfterImport("sglang.srt.speculative.dflash_worker_v2", _stay))

if os.environ.get("DDTREE_TEST_REFERENCE_KERNELS"):

    def _use_reference(module):
        import reference_kernels

        for name in reference_kernels.PLACES[module.__name__.removeprefix("sglang.")]:
            assert hasattr(module, name), f"{module.__name__} has no {name} to replace"
            setattr(module, name, getattr(reference_kernels, name))

    from reference_kernels import PLACES

    for _module in PLACES:
        sys.meta_path.insert(0, _AfterImport(f"sglang.{_module}", _use_reference))

sys.meta_path.insert(0, _AfterImport("sglang.srt.batch_invariant_ops", _without_batch_invariant_kernels))

if os.environ.get("DDTREE_COUNT") and __name__ == "sitecustomize":
    # Operations of a step are counted as on a GPU; its `sitecustomize` is hidden by this one, unless it runs this one.
    _folder = os.path.join(os.path.dirname(__file__), "../../../scripts/gpu_watch")
    sys.path.append(_folder)
    _spec = importlib.util.spec_from_file_location("gpu_watch", os.path.join(_folder, "sitecustomize.py"))
    _spec.loader.exec_module(importlib.util.module_from_spec(_spec))
