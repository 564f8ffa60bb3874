# SPDX-License-Identifier: Apache-2.0
"""Commits against SGLang's real pools, allocators and radix cache: whose KV lies where after many steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.memory_pool import (
    HybridLinearKVPool,
    MHATokenToKVPool,
    MHATokenToKVPoolFP4,
)
from sglang.srt.speculative.ddtree import kv_move
from sglang.srt.speculative.ddtree.move_kernel import move_rows
from tests.overlay.commit_engine import VOCABULARY, Engine, serve, text_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e5m2], ids=["float32", "float8"])
@pytest.mark.parametrize("early", [True, False], ids=["early", "late"])
@pytest.mark.parametrize(("page_size", "budget"), [(1, 9), (4, 3), (16, 9), (16, 40), (64, 9)])
def test_committed_kv_is_that_of_the_text_and_no_slot_is_lost(
    page_size: int, budget: int, dtype: torch.dtype, early: bool
) -> None:
    """Sixty requests with shared prefixes, stops, aborts and retractions; the allocator ends where it began.

    The drafter's KV is written before the host knows of a stop, or from what `verify` gives back.

    In SubSir's DDTREE accepted slots were re-pointed, and overwritten by the next step.
    """
    engine = Engine(page_size, dtype, budget, seed=budget * 100 + page_size, early=early)
    idle = engine.allocator.available_size()
    serve(engine, 60)
    assert engine.rows.available_size() == engine.rows.size
    assert engine.allocator.available_size() + engine.cache.evictable_size() == idle
    engine.cache.evict(EvictParams(num_tokens=10**6))
    assert engine.allocator.available_size() == idle


def test_radix_hit_on_decoded_text_finds_its_kv() -> None:
    """A second turn reads the KV that tree steps committed, in both pools."""
    engine = Engine(16, torch.float32, 9, seed=3)
    first = engine.start([1, 2, 3, 4, 5], max_new_tokens=60, stop=VOCABULARY)
    while engine.running:
        engine.step()
    text = text_of(first)
    second = engine.start([*text, 7, 7], max_new_tokens=9)
    assert second.cache_protected_len == len(text) // 16 * 16 > 48
    engine.check()


def rows_after(move: Any, path: list[list[int]], counts: list[int], width: int) -> list[list[int]]:
    """What lies in each request's slots after a move; before, slot i of request b holds 100 b + i."""
    pool = MHATokenToKVPool(256, 16, torch.float32, 3, 40, 2, "cpu", enable_memory_saver=False, v_head_dim=8)
    slots = torch.randperm(255, generator=torch.Generator().manual_seed(1))[: len(path) * width] + 1
    slots = slots.view(-1, width)
    values = torch.arange(width) + 100 * torch.arange(len(path)).unsqueeze(1)
    for salt, buffer in enumerate((*pool.k_buffer, *pool.v_buffer)):
        buffer[slots] = (values + 1000 * salt).float().unsqueeze(-1).unsqueeze(-1).expand(-1, -1, *buffer.shape[1:])
    move(pool, slots, torch.tensor(path), torch.tensor(counts, dtype=torch.int32))
    moved: list[list[list[int]]] = []
    for salt, buffer in enumerate((*pool.k_buffer, *pool.v_buffer)):
        rows = buffer[slots]
        assert torch.equal(rows, rows[..., :1, :1].expand_as(rows))
        values = (rows[..., 0, 0] - 1000 * salt).long()
        moved.append(values.tolist())
    assert all(values == moved[0] for values in moved)
    return moved[0]


def by_kernel(pool: MHATokenToKVPool, slots: torch.Tensor, path: torch.Tensor, counts: torch.Tensor) -> None:
    move_rows(pool.data_ptrs, pool.data_strides, slots, path, counts, int(pool.data_strides.max()))


@pytest.mark.parametrize("move", [kv_move.move_to_front, by_kernel], ids=["tensors", "kernel"])
def test_a_moved_row_is_read_before_it_is_overwritten(move: Any) -> None:
    """Path 0, 2, 3 overwrites row 2, which is the source of row 1: SGLang's own kernel may read it too late."""
    path = [[0, 2, 3, 6, -1], [0, 1, 2, 3, 4], [0, 5, -1, -1, -1], [0, 1, 4, 5, 6]]
    assert rows_after(move, path, [4, 5, 2, 3], width=7) == [
        [0, 2, 3, 6, 4, 5, 6],
        [100, 101, 102, 103, 104, 105, 106],
        [200, 205, 202, 203, 204, 205, 206],
        [300, 301, 304, 303, 304, 305, 306],  # a stop cut the path: nodes 5 and 6 stay where they are
    ]


def hybrid_pool(dtype: torch.dtype) -> HybridLinearKVPool:
    """The pool of a model with recurrent layers: only every fourth layer has KV."""
    options = {"head_num": 1, "head_dim": 8, "full_attention_layer_ids": [3, 7], "device": "cpu", "mamba_pool": None}
    return HybridLinearKVPool(size=64, dtype=dtype, page_size=16, enable_kvcache_transpose=False, **options)


def test_kv_of_a_hybrid_model_moves_although_sglang_cannot_move_it() -> None:
    """SGLang builds these pools without its copy kernel; its own `move_kv_cache` is an error (sglang#27463)."""
    pool = kv_move.movable_pool(hybrid_pool(torch.bfloat16), 16)
    slots = torch.arange(16, 32).unsqueeze(0)
    pool.k_buffer[1][slots] = torch.arange(16, dtype=torch.bfloat16).view(1, 16, 1, 1)
    kv_move.move_to_front(pool, slots, torch.tensor([[0, 5, 6]]), torch.tensor([3]))
    assert pool.k_buffer[1][slots[0, :4], 0, 0].tolist() == [0, 5, 6, 3]


def test_pools_that_keep_kv_elsewhere_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float4 keeps scales beside the values, and SGLang's own move leaves them behind (sglang#40734).

    From 0.5.17 on its pool is of the plain class.
    """
    options = {"head_num": 1, "head_dim": 32, "layer_num": 1, "device": "cpu", "enable_memory_saver": False}
    pool = MHATokenToKVPoolFP4(64, 16, torch.uint8, **options)
    with pytest.raises(ValueError, match=r"it is 16\), and that is not proven for MHATokenToKVPoolFP4.*--page-size 1"):
        kv_move.movable_pool(pool, 16)
    plain = MHATokenToKVPool(64, 16, torch.bfloat16, **options)
    assert kv_move.movable_pool(plain) is plain
    monkeypatch.setattr(MHATokenToKVPool, "is_quantized_kv_cache", True, raising=False)
    with pytest.raises(ValueError, match="not proven for the scales of a quantised MHATokenToKVPool"):
        kv_move.movable_pool(plain)
