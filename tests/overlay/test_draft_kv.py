# SPDX-License-Identifier: Apache-2.0
"""Draft KV of the first worker: what SGLang's own helper writes, without its question to the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.speculative.ddtree.draft_kv import append_draft_kv
from sglang.srt.speculative.triton_ops.fused_kv_materialize import FusedKVMaterializeHelper
from torch.utils._python_dispatch import TorchDispatchMode


LAYERS, HEADS, HEAD, HIDDEN, TABLE = 2, 2, 8, 12, 40


class Pool:
    """What was written into it."""

    def __init__(self) -> None:
        self.written: list[tuple[Any, ...]] = []

    def set_kv_buffer(self, *given: Any) -> None:
        self.written.append(given)


def layer() -> SimpleNamespace:
    """A drafter's layer, as far as its KV goes."""
    size = HEADS * HEAD
    return SimpleNamespace(
        self_attn=SimpleNamespace(
            attn=SimpleNamespace(k_scale=None, v_scale=None),
            num_kv_heads=HEADS,
            head_dim=HEAD,
            q_size=size,
            kv_size=size,
            rotary_emb=SimpleNamespace(rotary_dim=HEAD, is_neox_style=True),
            qkv_proj=SimpleNamespace(weight=torch.randn(3 * size, HIDDEN)),
            k_norm=SimpleNamespace(weight=torch.randn(HEAD), variance_epsilon=1e-6),
        )
    )


@pytest.fixture
def worker() -> SimpleNamespace:
    """DFLASH's worker with its helper, and a layer-by-layer way that is noted."""
    torch.manual_seed(1)
    layers = [layer() for _ in range(LAYERS)]
    rope = SimpleNamespace(rotary_dim=HEAD, is_neox_style=True, cos_sin_cache=torch.randn(TABLE, HEAD))
    made = SimpleNamespace(
        _use_fused_kv_materialize=True,
        _fused_kv_helper=FusedKVMaterializeHelper(layers, rope, HEADS, HEAD, torch.device("cpu")),
        draft_model=SimpleNamespace(layers=layers),
        draft_model_runner=SimpleNamespace(token_to_kv_pool=Pool()),
        by_layer=0,
    )

    def sequential(*_: torch.Tensor) -> None:
        made.by_layer += 1

    made._append_target_hidden_sequential = sequential
    return made


def rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Context, positions and slots of some tokens."""
    return torch.randn(5, HIDDEN), torch.tensor([3, 4, 5, 0, 39]), torch.tensor([7, 8, 9, 0, 0])


class NoNumbers(TorchDispatchMode):
    """Ends the test where a tensor is asked for its number, which on a GPU waits for it."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function is not torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_it_is_what_sglang_writes(worker: SimpleNamespace) -> None:
    """Key by key, value by value, in every layer."""
    context, positions, slots = rows()
    append_draft_kv(worker, context, positions, slots, longest=39)
    found = worker.draft_model_runner.token_to_kv_pool.written

    expected: list[tuple[torch.Tensor, torch.Tensor]] = []
    worker._fused_kv_helper.materialize(context, positions, lambda _, keys, values: expected.append((keys, values)))
    assert [write[0] for write in found] == [layer.self_attn.attn for layer in worker.draft_model.layers]
    for write, (keys, values) in zip(found, expected, strict=True):
        assert write[1] is slots
        torch.testing.assert_close(write[2], keys)
        torch.testing.assert_close(write[3], values)
    assert worker.by_layer == 0


def test_the_device_is_asked_for_no_number(worker: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verify pass is still under way when it is launched: reading the largest position back would wait for it."""
    from sglang.srt.speculative.triton_ops import fused_kv_materialize

    monkeypatch.setattr(  # the interpreter itself reads tensors
        fused_kv_materialize, "_fused_norm_rope", lambda *_: (torch.zeros(()), torch.zeros(()))
    )
    given = rows()
    with NoNumbers():
        append_draft_kv(worker, *given, longest=39)

    assert len(worker.draft_model_runner.token_to_kv_pool.written) == LAYERS


@pytest.mark.parametrize("fault", ["kernel", "table"])
def test_a_fused_kernel_that_fails_is_not_tried_again(
    worker: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    """SGLang goes on layer by layer, and so does a tree's step; the log says so."""
    from sglang.srt.speculative.triton_ops import fused_kv_materialize

    def fail(*_: Any) -> None:
        raise RuntimeError("no kernel image")

    if fault == "kernel":
        monkeypatch.setattr(fused_kv_materialize, "_fused_norm_rope", fail)
    longest = 39 if fault == "kernel" else TABLE
    for _ in range(2):
        append_draft_kv(worker, *rows(), longest=longest)

    assert worker.by_layer == 2
    assert not worker._use_fused_kv_materialize
    assert len([record for record in caplog.records if "layer by layer" in record.message]) == 1
