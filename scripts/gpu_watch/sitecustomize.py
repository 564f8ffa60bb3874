# SPDX-License-Identifier: Apache-2.0
"""A second opinion on every tree verify of an engine, for `scripts/gpu_prove`.

Put this folder on PYTHONPATH and name a file in `DDTREE_WATCH`: each verify forward of the target that replays a CUDA
graph is run again without it, on the same inputs and slots, and a JSON line says how far the two are apart.
"""

import importlib.abc
import importlib.machinery
import json
import os
import sys


MODULE = "sglang.srt.model_executor.model_runner"


def watch(module, target):
    """Wrap `ModelRunner._forward_raw`, which decides whether a graph is replayed."""
    plain = module.ModelRunner._forward_raw

    def _forward_raw(self, forward_batch, *args, **kwargs):
        if self.is_draft_worker or not forward_batch.forward_mode.is_target_verify() or not self.graph_runner:
            return plain(self, forward_batch, *args, **kwargs)
        # A verify shifts the convolution windows of recurrent layers in place.
        windows = [(window, window.clone()) for window in recurrent_windows(self)]
        given = plain(self, forward_batch, *args, **kwargs)
        for window, before in windows:
            window.copy_(before)
        logits, hidden = (part.clone() for part in parts(given.logits_output))
        graph, self.graph_runner = self.graph_runner, None
        try:
            again = plain(self, forward_batch, *args, **kwargs)
        finally:
            self.graph_runner = graph
        with open(target, "a") as out:
            line = compare(forward_batch, logits, hidden, *parts(again.logits_output))
            out.write(json.dumps({"graph": bool(given.can_run_graph), **line}) + "\n")
        given.logits_output.next_token_logits, given.logits_output.hidden_states = logits, hidden
        return given

    module.ModelRunner._forward_raw = _forward_raw


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
        "rows": logits.shape[0],
        "lengths": forward_batch.seq_lens.tolist(),
        "logits": float((logits.float() - eager_logits.float()).abs().max()),
        "hidden": float((hidden.float() - eager_hidden.float()).abs().max()),
        "gaps": gaps,
        "finite": bool(logits.isfinite().all()) and bool(hidden.isfinite().all()),
    }


class AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Runs `watch` once the module has been executed."""

    def find_spec(self, name, path=None, target=None):
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)
        watch(module, os.environ["DDTREE_WATCH"])


if os.environ.get("DDTREE_WATCH"):
    sys.meta_path.insert(0, AfterImport())
