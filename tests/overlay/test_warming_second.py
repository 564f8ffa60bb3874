# SPDX-License-Identifier: Apache-2.0
"""Nothing is compiled while serving, in the second worker: its steps against its start, variant by variant."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.speculative import spec_utils
from sglang.srt.speculative.ddtree import warming
from tests.overlay.publishing import publish
from tests.overlay.warming_standins import (
    BLOCK,
    HIDDEN,
    PACKAGE,
    VOCABULARY,
    WIDTHS,
    UnsetWorker,
    Variant,
    note_launches,
)
from tests.support.variants import variant


#: What the modules of the worker import, and a step of these tests does not come to.
_UNUSED = {
    "draft_arguments": "draft_arguments",
    "draft_kv_graphs": "DraftKVGraphs capture_draft_kv",
    "draft_scope": "draft_scope",
    "draft_state": "bonus_of next_draft_input",
    "drafter_weights": "",
    "grammar": "node_grammar",
    "logprobs": "add_logprobs",
    "penalties": "root_penalties",
    "plain_forward": "decode_batch",
    "reserved": "reserved_lens",
    "verify_input": "prepare_verify",
}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the second worker, beside an SGLang that has the first one's."""
    dflash = ModuleType("sglang.srt.speculative.dflash_worker_v2")
    dflash.DFlashWorkerV2 = type("DFlashWorkerV2", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, dflash.__name__, dflash)
    for name, functions in _UNUSED.items():
        stand_in = ModuleType(f"{PACKAGE}.{name}")
        for function in functions.split():
            setattr(stand_in, function, lambda *_, **__: None)
        if name == "drafter_weights":
            stand_in.DrafterWeights = type("DrafterWeights", (), {})  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(spec_utils, "commit_mamba_states_after_verify", lambda *_: None, raising=False)
    judging, plain_steps = (variant("second", name) for name in ("judging", "plain_steps"))
    for part in (judging, plain_steps):
        monkeypatch.setitem(sys.modules, f"{PACKAGE}.{part.__name__}", part)
    monkeypatch.setattr(judging, "GenerationBatchResult", SimpleNamespace)
    monkeypatch.setattr(plain_steps, "bonus_of", lambda roots: roots)
    monkeypatch.setattr(plain_steps, "prepare_plain", lambda *_: None)
    loaded = variant("second", "worker")
    monkeypatch.setattr(loaded, "reserved_lens", lambda _: (None, 300))
    monkeypatch.setattr(loaded, "committed_rows", lambda values, _: values)  # nothing was launched: no rows
    parts = variant("second", "warming_parts")
    for name in ("DRAFTS_GRAMMARS", "warm_commit"):
        monkeypatch.setattr(warming, name, getattr(parts, name))
    return loaded


def worker_of(module: Any, *given: Any) -> Any:
    """A worker of the module's class that never was set up."""

    class Worker(UnsetWorker, module.DDTreeWorker):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(*given)
            self._pool, self._captured_head, self._draft_kv_graphs, self._is_first_rank = self.kv_pool, None, None, True
            self._append_target_hidden_to_draft_kv_by_loc = lambda **_: None
            self._validate_phase1_sampling_support = lambda _: None
            table = torch.zeros((200, 300), dtype=torch.int32)
            self.model_runner.req_to_token_pool = SimpleNamespace(req_to_token=table)

    return Worker()


def step(worker: Any, batch_size: int, *, has_grammar: bool) -> None:
    """What a step launches from the drafter's hidden states to its result, but for the target's forward."""
    nodes = batch_size * worker._choosing.choose()[0]
    output = SimpleNamespace(
        hidden_states=torch.zeros(nodes, HIDDEN),
        next_token_logits=torch.zeros(nodes, VOCABULARY),
        can_run_cuda_graph=True,
    )
    worker.target_worker = SimpleNamespace(
        forward_batch_generation=lambda **_: SimpleNamespace(logits_output=output, can_run_cuda_graph=True)
    )
    lens = torch.ones(batch_size, dtype=torch.int64)
    batch = SimpleNamespace(
        reqs=[SimpleNamespace(rid="")] * batch_size,
        seq_lens=lens,
        sampling_info=None,
        has_grammar=has_grammar,
        req_pool_indices=torch.arange(batch_size),
        spec_info=lens,
    )
    if worker._choosing.choose()[1] == warming.NONE:
        worker._decode_plainly(batch)
        return
    block = torch.zeros((batch_size, BLOCK), dtype=torch.int64)
    worker._verify_tree(
        batch,
        draft_input=None,
        draft_hidden=torch.zeros((batch_size * BLOCK, HIDDEN)),
        block_ids=block,
        block_positions=block.reshape(-1),
        block_slots=block,
        on_publish=None,
    )


@pytest.mark.parametrize(("deterministic", "calibration"), [(False, "auto"), (False, "off"), (True, "1.3")])
def test_a_step_launches_nothing_that_start_up_did_not(
    module: Any, monkeypatch: pytest.MonkeyPatch, deterministic: bool, calibration: str
) -> None:
    """Every lane, the chain, every class of batches, with grammars and without, roots alone and whole trees."""
    variants: list[Variant] = note_launches(monkeypatch)
    publish(SimpleNamespace(speculative_ddtree_budget="auto"))
    worker = worker_of(module, 1, deterministic, calibration)
    worker.choosing(WIDTHS[1], warming.TREE, WIDTHS[1])
    warming.warm_up(worker)
    warm = set(variants)
    assert len(warm) < 100  # a start must not take minutes

    served: set[Variant] = set()
    for width, shape, grown in warming.kinds_of(WIDTHS, BLOCK, grows=True):
        worker.choosing(width, shape, grown)
        for batch_size in (1, 2, 33, 64, 65, 200):
            for has_grammar, penalised in ((False, False), (True, False), (False, True)):
                only = torch.ones(batch_size, dtype=torch.bool) if penalised else None
                monkeypatch.setattr(sys.modules[f"{PACKAGE}.judging"], "roots_only", lambda *_, only=only: only)
                variants.clear()
                step(worker, batch_size, has_grammar=has_grammar)
                served |= set(variants)
    assert served <= warm
    assert len(served) > len(warm) / 2  # and it is those that steps come upon
