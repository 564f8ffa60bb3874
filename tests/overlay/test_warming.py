# SPDX-License-Identifier: Apache-2.0
"""Nothing is compiled while serving: what steps launch has been launched at start-up, variant by variant."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.speculative.ddtree import launching, verify_input, warming
from sglang.srt.speculative.ddtree import worker as worker_module
from sglang.srt.speculative.ddtree.choosing import CHAIN, NONE, TREE
from tests.overlay.publishing import publish
from tests.overlay.warming_standins import BLOCK, HIDDEN, MOST, WIDTHS, UnsetWorker, Variant, note_launches


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> list[Variant]:
    """The launches of a test."""
    return note_launches(monkeypatch)


class Worker(UnsetWorker, worker_module.DDTreeWorker):
    """The first generation's."""

    def __init__(self, page_size: int, deterministic: bool, calibration: str) -> None:
        super().__init__(page_size, deterministic, calibration)
        self.use_compact_draft_cache = False
        self._draft_block_positions_buf = torch.zeros((MOST, BLOCK), dtype=torch.int64)
        self._moving_pool = self.kv_pool if page_size > 1 else None
        self.draft_model = SimpleNamespace(project_target_hidden=lambda hidden: hidden)
        self._copies = SimpleNamespace(of=lambda tensor: SimpleNamespace(wait=lambda: tensor))


def step(worker: Worker, batch_size: int, *, penalised: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step launches from the drafter's hidden states to the wait for the host, but for the target's forward."""
    monkeypatch.setattr(
        verify_input.DDTreeVerifyInput,
        "prepare_for_verify",
        lambda _, batch, *__, **___: None,  # noqa: ARG005
    )
    monkeypatch.setattr(verify_input.DDTreeVerifyInput, "_commit", lambda *_: (None,) * 4)
    only = torch.ones(batch_size, dtype=torch.bool) if penalised else None
    monkeypatch.setattr(verify_input, "roots_only", lambda *_: only)
    monkeypatch.setattr(worker_module, "append_draft_kv", lambda *_, **__: None)
    monkeypatch.setattr(worker_module, "committed_rows", lambda values, _: values)  # nothing was launched: no rows
    # SGLang's own verify input has these only after an edit; these tests lay nothing but our modules over it.
    links = ("retrieve_next_token", "retrieve_next_sibling")
    made = verify_input.DDTreeVerifyInput
    monkeypatch.setattr(
        worker_module,
        "DDTreeVerifyInput",
        lambda **given: made(**{name: value for name, value in given.items() if name not in links}),
    )
    monkeypatch.setattr(torch.Tensor, "tolist", lambda _: [])
    (width, shape), lens = worker._choosing.choose(), torch.ones(batch_size, dtype=torch.int64)
    batch = SimpleNamespace(
        reqs=[SimpleNamespace(rid="", sampling_params=None)] * batch_size,
        seq_lens=lens,
        seq_lens_cpu=lens,
        forward_mode=SimpleNamespace(is_idle=lambda: False),
        sampling_info=None,
        out_cache_loc=torch.zeros(batch_size * width, dtype=torch.int64),
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros((batch_size, 300), dtype=torch.int32)),
        req_pool_indices=torch.arange(batch_size),
    )
    if shape == NONE:
        output = SimpleNamespace(
            hidden_states=torch.zeros(batch_size, HIDDEN), next_token_logits=torch.zeros(batch_size, 9)
        )
        tree = worker_module.root_tree(lens, lens)
        given: Any = verify_input.DDTreeVerifyInput(
            draft_token=tree.tokens.reshape(-1),
            positions=tree.positions.reshape(-1),
            draft_token_num=1,
            tree=tree,
            targets=worker._targets,
            copies=worker._copies,
            block_size=BLOCK,
            pool=worker._moving_pool,
            on_accepted=worker._write_root_kv,
        )
    else:
        hidden = torch.zeros((batch_size, BLOCK, HIDDEN))
        worker._prepare_tree_verify(
            batch, draft_hidden=hidden, block_ids=torch.zeros((batch_size, BLOCK), dtype=torch.int64), lm_head=None
        )
        nodes, given = batch_size * width, batch.spec_info
        output = SimpleNamespace(hidden_states=torch.zeros(nodes, HIDDEN), next_token_logits=torch.zeros(nodes, 9))
    given.verify(batch=batch, logits_output=output, page_size=worker.page_size)


@pytest.mark.parametrize(
    ("page_size", "deterministic", "calibration"), [(1, False, "auto"), (16, False, "off"), (1, True, "1.3")]
)
def test_a_step_launches_nothing_that_start_up_did_not(
    variants: list[Variant],
    monkeypatch: pytest.MonkeyPatch,
    page_size: int,
    deterministic: bool,
    calibration: str,
) -> None:
    """Every lane, the chain, the plain step, every class of batches, requests whose roots alone are judged."""
    publish(SimpleNamespace(speculative_ddtree_budget="auto"))
    worker = Worker(page_size, deterministic, calibration)
    worker.choosing(1, NONE, 1)
    warming.warm_up(worker)
    warm = set(variants)
    assert len(warm) < 80  # a start must not take minutes

    served: set[Variant] = set()
    for width, shape, grown in warming.kinds_of(WIDTHS, BLOCK, grows=True):
        worker.choosing(width, shape, grown)
        for batch_size in (1, 2, 33, 64, 65, 200):
            for penalised in (False, True):
                variants.clear()
                with monkeypatch.context() as patched:
                    step(worker, batch_size, penalised=penalised, monkeypatch=patched)
                served |= set(variants)
    assert served <= warm
    assert len(served) > len(warm) / 2  # and it is those that steps come upon


def test_given_exponents_cost_a_step_what_none_do(variants: list[Variant], monkeypatch: pytest.MonkeyPatch) -> None:
    """Their moments are for the fit alone: no launch more than without calibration, and two sums a tile."""
    publish(SimpleNamespace(speculative_ddtree_budget=64))
    launched, sums = {}, {}
    for calibration in ("off", "1.3", "auto"):
        worker = Worker(1, False, calibration)
        worker.choosing(65, TREE, 65)
        variants.clear()
        with monkeypatch.context() as patched:
            step(worker, 2, penalised=False, monkeypatch=patched)
        launched[calibration] = [variant[0] for variant in variants]
        sums[calibration] = {variant[-1] for variant in variants if variant[0] == "_read_kernel"}

    assert launched["1.3"] == launched["off"]
    assert "_read_kernel" in launched["off"]
    assert len(launched["auto"]) == len(launched["off"]) + 1
    assert sums == {"off": {2}, "1.3": {2}, "auto": {4}}


def test_steps_are_of_these_kinds() -> None:
    """A tree may be grown to the next lane and to the widest; the chain is as wide as it is, and a root alone too."""
    kinds = warming.kinds_of((1, 3, 16, 65), 16, grows=True)

    assert set(kinds) == {
        (1, NONE, 1),
        (3, TREE, 3),
        (3, TREE, 16),
        (3, TREE, 65),
        (16, TREE, 16),
        (16, TREE, 65),
        (65, TREE, 65),
        (16, CHAIN, 16),
    }
    assert warming.kinds_of((17,), 16, grows=False) == [(17, TREE, 17)]


def test_what_is_compiled_while_serving_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A proof on a GPU, or an operator, sees which variant start-up missed."""

    class Kernel:
        __name__ = "_late_kernel"

        def __getitem__(self, grid: Any) -> Callable[..., Any]:
            return lambda *_, **__: Kernel()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launching, "_compiled", {})
    monkeypatch.setattr(launching, "_serving", [False])
    kernel, args = Kernel(), (SimpleNamespace(is_cuda=True),)
    launching.launch(kernel, (1, 1, 1), args, {"A": 1}, num_warps=1)
    launching.begin_serving()
    for constant in (1, 2, 2):
        launching.launch(kernel, (1, 1, 1), args, {"A": constant}, num_warps=1)

    late = [record.getMessage() for record in caplog.records if "while serving" in record.getMessage()]
    assert late == ["DDTREE: compiling _late_kernel while serving: () {'A': 2}"]
    assert launching.compiled_kernels() == 2
