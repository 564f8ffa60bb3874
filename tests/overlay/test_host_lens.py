# SPDX-License-Identifier: Apache-2.0
"""The lengths that a step of the second worker shows the host, which may know only those before the step in flight."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.speculative.ddtree.tree import root_tree
from tests.overlay.lane_standins import arguments
from tests.overlay.publishing import publish
from tests.overlay.warming_standins import PACKAGE
from tests.support.variants import variant


#: Committed tokens, the most that the host may assume, and what it knew before the step in flight.
LENS, RESERVED, KNOWN = torch.tensor([20, 9]), torch.tensor([52, 41]), torch.tensor([14, 9])


@pytest.fixture(autouse=True)
def second(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other releases lay beside the modules of these tests."""
    publish(arguments())
    given: dict[str, dict[str, Any]] = {
        "draft_kv_graphs": {"DraftKVGraphs": object, "capture_draft_kv": None},
        "draft_state": {"bonus_of": None},
        "plain_forward": {"decode_batch": decode_batch},
        "plans": {"plan_fields": lambda *_: {}},
        "reserved": {"reserved_lens": lambda _: (RESERVED, int(RESERVED.sum()))},
    }
    for name, attributes in given.items():
        module = ModuleType(f"{PACKAGE}.{name}")
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, module.__name__, module)


class Decoded(SimpleNamespace):
    """A `ForwardBatch` with rotary positions of three parts, which SGLang made of the host's lengths."""

    def compute_spec_mrope_positions(self, model_runner: Any, batch: Any, seq_positions: torch.Tensor) -> None:  # noqa: ARG002
        self.mrope_positions = seq_positions.flatten().expand(3, -1)


def decode_batch(batch: Any, model_runner: Any) -> Decoded:
    """The batch as it was when SGLang read it."""
    made = (batch.seq_lens_cpu - 1).expand(3, -1) if model_runner.mrope else None
    return Decoded(**vars(batch), mrope_positions=made)


class VerifyInput(SimpleNamespace):
    """A verify input that shows the batch as SGLang reads it."""

    def prepare_for_verify(self, batch: Any, target_worker: Any) -> tuple[Any, bool]:  # noqa: ARG002
        return SimpleNamespace(**vars(batch)), True


def batch_of(known: torch.Tensor | None) -> SimpleNamespace:
    """Two requests."""
    total = None if known is None else int(known.sum())
    return SimpleNamespace(seq_lens=LENS, seq_lens_cpu=known, seq_lens_sum=total, spec_info="draft state")


def runner_of(*, mrope: bool) -> SimpleNamespace:
    """A target without graphs."""
    backend = SimpleNamespace(init_forward_metadata=lambda _: None)
    return SimpleNamespace(mrope=mrope, decode_cuda_graph_runner=None, attn_backend=backend)


@pytest.mark.parametrize("known", [KNOWN, None])
def test_a_plain_step_lets_the_host_plan_for_what_is_reserved(known: torch.Tensor | None):
    """In 0.5.14 the host's own lengths lag: KV indices would be written behind a buffer that was made for them."""
    batch, tree = batch_of(known), root_tree(torch.tensor([7, 8]), LENS)

    decoded = variant("second", "plain_steps").prepare_plain(batch, runner_of(mrope=False), tree, tree.tokens)

    assert decoded.seq_lens_cpu is RESERVED
    assert decoded.seq_lens_sum == RESERVED.sum()
    assert decoded.seq_lens.tolist() == [21, 10]
    assert (decoded.spec_info, decoded.mrope_positions) == (None, None)
    assert vars(batch) == vars(batch_of(known)) | {"input_ids": batch.input_ids, "out_cache_loc": batch.out_cache_loc}


def test_a_plain_step_places_its_tokens_by_the_devices_lengths():
    """Rotary positions of several parts are the host's business in SGLang up to 0.5.17."""
    batch, tree = batch_of(None), root_tree(torch.tensor([7, 8]), LENS)

    decoded = variant("second", "plain_steps").prepare_plain(batch, runner_of(mrope=True), tree, tree.tokens)

    assert decoded.mrope_positions.tolist() == [LENS.tolist()] * 3


@pytest.mark.parametrize(("width", "room"), [(3, 16), (16, 16), (33, 33)])
def test_a_narrow_tree_leaves_room_for_the_block_before_it(monkeypatch: pytest.MonkeyPatch, width: int, room: int):
    """The step in flight may be one of a wider lane, and commits a block of 16 at most."""
    monkeypatch.setitem(sys.modules, "verify_input", ModuleType("verify_input"))  # where a data class looks for types
    module = variant("second", "verify_input")
    monkeypatch.setattr(module, "DDTreeVerifyInput", VerifyInput)
    batch, nodes = batch_of(KNOWN), torch.zeros((2, width), dtype=torch.int64)
    tree = SimpleNamespace(tokens=nodes, positions=nodes, first_child=None, next_sibling=None)

    seen = module.prepare_verify(batch, None, None, tree, slots=nodes, custom_mask=torch.zeros(1))

    assert seen.seq_lens_cpu.tolist() == (KNOWN + room).tolist()
    assert seen.seq_lens_sum == KNOWN.sum() + 2 * room
    assert (batch.seq_lens_cpu is KNOWN, batch.seq_lens_sum) == (True, KNOWN.sum())
