# SPDX-License-Identifier: Apache-2.0
"""Checks that need a loaded model or real pools, and the sizes of the graph buffers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.server_args import set_global_server_args_for_scheduler
from sglang.srt.speculative.ddtree import gates
from sglang.srt.speculative.ddtree.args import extra_draft_columns


def server_args(**changed: object) -> SimpleNamespace:
    """Resolved DDTREE arguments: budget 64, block 16."""
    base: dict[str, object] = {
        "speculative_algorithm": "DDTREE",
        "speculative_ddtree_budget": 64,
        "speculative_dflash_block_size": 16,
        "speculative_ddtree_allow_hybrid_unsafe": False,
    }
    return SimpleNamespace(**(base | changed))


def runner(**changed: object) -> SimpleNamespace:
    """A loaded target with full attention and room for 4096 tokens."""
    base: dict[str, object] = {
        "server_args": server_args(),
        "sliding_window_size": None,
        "mambaish_config": None,
        "max_total_num_tokens": 4096,
        "model": object(),
    }
    return SimpleNamespace(**(base | changed))


def backend(width: int = 65) -> SimpleNamespace:
    """A Triton backend of an 8B model with a context of 128k, before its graph buffers exist."""
    return SimpleNamespace(
        num_head=32,
        max_kv_splits=8,
        v_head_dim=128,
        max_context_len=131072,
        num_draft_tokens=width,
        device="cpu",
        cuda_graph_custom_mask=torch.zeros(7, dtype=torch.uint8),
    )


def gpu_with(monkeypatch: pytest.MonkeyPatch, free: float) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(free), int(free)))


def test_plain_attention_model_is_served() -> None:
    """Nothing to refuse, nothing said."""
    gates.check_model_runner(runner())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"sliding_window_size": 4096}, "sliding-window attention .window 4096."),
        ({"mambaish_config": object()}, "--speculative-ddtree-allow-hybrid-unsafe"),
        ({"max_total_num_tokens": 65}, "65 free KV slots.*holds 65 tokens"),
    ],
)
def test_loaded_model_that_cannot_verify_a_tree_is_refused(changed: dict[str, object], said: str) -> None:
    """Sliding windows, recurrent layers and a pool without room for one step each end the start."""
    with pytest.raises(ValueError, match=said):
        gates.check_model_runner(runner(**changed))


def test_budget_beyond_graph_memory_is_refused_with_the_one_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The named budget does fit, and one more does not."""
    gpu_with(monkeypatch, 2 * 2**30)
    set_global_server_args_for_scheduler(server_args())
    # Buffers are only reserved by name here: the check comes before the allocation.
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    with pytest.raises(ValueError, match=r"48 requests of 513 tokens.*at most (\d+) fits") as refused:
        gates.prepare_graph_buffers(backend(513), 48, 48 * 513, None)
    fits = int(str(refused.value).split("at most ")[1].split()[0])
    assert 1 < fits < 512
    gates.prepare_graph_buffers(backend(513), 48, 48 * (fits + 1), None)
    with pytest.raises(ValueError, match="at most"):
        gates.prepare_graph_buffers(backend(513), 48, 48 * (fits + 2), None)


def test_kv_indices_have_one_row_a_request() -> None:
    """Tree verify reads a row of prefix slots per request, not per node."""
    set_global_server_args_for_scheduler(server_args())
    buffer = gates.prepare_graph_buffers(backend(), 2, 2 * 65, None)
    assert buffer is not None
    assert buffer.shape == (2 * 131072,)


def test_graph_mask_holds_a_full_batch_at_the_end_of_the_context() -> None:
    """Every request at the last position needs its width on top of the context, more than SGLang's own size."""
    set_global_server_args_for_scheduler(server_args())
    small = backend(9)
    small.max_context_len = 32
    assert gates.grow_graph_mask(small, 3 * 9).numel() >= 3 * 9 * (31 + 9)


def test_other_algorithms_keep_their_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without DDTREE nothing is checked, grown or replaced."""
    gpu_with(monkeypatch, 0)
    set_global_server_args_for_scheduler(server_args(speculative_algorithm="DFLASH"))
    triton = backend()
    assert gates.prepare_graph_buffers(triton, 48, 48 * 65, None) is None
    assert gates.grow_graph_mask(triton, 48 * 65) is triton.cuda_graph_custom_mask
    assert extra_draft_columns(server_args(speculative_algorithm="DFLASH")) == 0


@pytest.mark.parametrize(("budget", "columns"), [(1, 14), (15, 0), (64, 0)])
def test_request_rows_hold_the_wider_of_draft_and_tree(budget: int, columns: int) -> None:
    """A budget below the block leaves the draft wider: its extra columns keep it out of the next request's row."""
    assert extra_draft_columns(server_args(speculative_ddtree_budget=budget)) == columns
