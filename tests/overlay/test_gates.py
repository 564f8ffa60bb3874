# SPDX-License-Identifier: Apache-2.0
"""Checks that need a loaded model or real pools, and the sizes of the graph buffers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.speculative.ddtree import backends, gates
from sglang.srt.speculative.ddtree.args import extra_draft_columns
from sglang.srt.speculative.ddtree.held_slots import held_slots
from sglang.srt.speculative.ddtree.hybrid import hybrid_risk
from sglang.srt.speculative.ddtree.lane_bytes import Planned, plan
from sglang.srt.speculative.ddtree.lane_sizes import lane_batch_sizes
from sglang.srt.speculative.ddtree.proven import RECURRENT_LAYERS_RAN
from sglang.srt.speculative.ddtree.request_length import longest_request
from tests.overlay.publishing import publish


def strategy(name: str) -> dict[str, object]:
    """How recurrent states are cached, by the names of all releases."""
    return {"mamba_scheduler_strategy": name, "mamba_radix_cache_strategy": name}


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else is going to take memory."""
    monkeypatch.setattr(gates, "promised_bytes", lambda _: 0)


@pytest.fixture(autouse=True)
def _recurrent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later releases look at the model's config, which is none of Hugging Face's here."""
    monkeypatch.setattr(gates, "is_recurrent", lambda runner: runner.mambaish_config is not None)


def server_args(**changed: object) -> SimpleNamespace:
    """Resolved DDTREE arguments: budget 64, block 16."""
    base: dict[str, object] = {
        "speculative_algorithm": "DDTREE",
        "speculative_ddtree_budget": 64,
        "speculative_ddtree_budgets": None,
        "speculative_dflash_block_size": 16,
        "speculative_ddtree_allow_hybrid_unsafe": False,
        "disable_radix_cache": True,
        "attention_backend": "triton",
        "prefill_attention_backend": None,
        "decode_attention_backend": None,
        "page_size": 1,
        "max_running_requests": 48,
        "max_mamba_cache_size": None,
        "linear_attn_backend": "triton",
        "linear_attn_decode_backend": None,
        "linear_attn_prefill_backend": None,
        **strategy("no_buffer"),
        "speculative_num_draft_tokens": 65,
    }
    return SimpleNamespace(**(base | changed))


def runner(**changed: object) -> SimpleNamespace:
    """A loaded target with full attention, the size of an 8B model; its drafter reads five layers."""
    base: dict[str, object] = {
        "server_args": server_args(),
        "sliding_window_size": None,
        "mambaish_config": None,
        "model": object(),
        "model_config": model_config(),
        "kv_cache_dtype": torch.bfloat16,
        "is_draft_worker": False,
        "dflash_target_layer_ids": [1, 9, 17, 25, 33],
        "dtype": torch.bfloat16,
    }
    return SimpleNamespace(**(base | changed))


def model_config(**changed: object) -> SimpleNamespace:
    """Of a model with plain attention."""
    base = {
        "hf_config": object(),
        "is_local_attention_model": False,
        "has_attention_sinks": False,
        "vocab_size": 151_936,
        "hidden_size": 4096,
    }
    return SimpleNamespace(**(base | changed))


def on(*backends: str) -> SimpleNamespace:
    """Arguments that name a prefill and a decode backend."""
    prefill, decode = backends
    return server_args(prefill_attention_backend=prefill, decode_attention_backend=decode)


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
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)


def test_plain_attention_model_is_served() -> None:
    """Nothing to refuse, nothing said; Triton counts sinks once and was proven with 8-bit KV."""
    gates.check_model_runner(runner())
    sinks = model_config(has_attention_sinks=True)
    gates.check_model_runner(runner(model_config=sinks, kv_cache_dtype=torch.float8_e5m2))
    gates.check_model_runner(runner(server_args=on("fa3", "flashinfer")))


def test_a_loaded_target_is_judged_by_the_backend_that_it_got(monkeypatch: pytest.MonkeyPatch) -> None:
    """From SGLang 0.5.19 on the arguments stay as they were written, and whoever writes no backend gets one."""
    written = server_args(attention_backend=None)
    monkeypatch.setattr(backends, "reading", lambda given: server_args() if given is written else given)
    gates.check_model_runner(runner(server_args=written, kv_cache_dtype=torch.float8_e5m2))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"sliding_window_size": 4096}, "sliding-window attention .window 4096."),
        ({"mambaish_config": object()}, "--speculative-ddtree-allow-hybrid-unsafe"),
        ({"model_config": model_config(is_local_attention_model=True)}, "chunked attention"),
        (
            {"server_args": on("triton", "fa3"), "model_config": model_config(has_attention_sinks=True)},
            "count the sinks twice",
        ),
        ({"server_args": on("fa3", "triton"), "kv_cache_dtype": torch.float8_e4m3fn}, "8 bits is not proven .* fa3"),
    ],
)
def test_loaded_model_that_cannot_verify_a_tree_is_refused(changed: dict[str, object], said: str) -> None:
    """Windows, chunks, sinks, 8-bit KV and recurrent layers that no test has shown end the start."""
    with pytest.raises(ValueError, match=said):
        gates.check_model_runner(runner(**changed))


@pytest.mark.parametrize(
    ("changed", "config", "said"),
    [
        ({}, SimpleNamespace(mamba_chunk_size=4), "not GDN"),
        ({"linear_attn_decode_backend": "flashinfer"}, SimpleNamespace(linear_key_head_dim=4), "flashinfer and triton"),
        (strategy("extra_buffer"), SimpleNamespace(linear_key_head_dim=4), "extra_buffer"),
        ({"disable_radix_cache": False}, SimpleNamespace(linear_key_head_dim=4), "--disable-radix-cache"),
        ({"page_size": 16}, SimpleNamespace(text_config=SimpleNamespace(linear_key_head_dim=4)), "with --page-size 16"),
        (
            {"prefill_attention_backend": "fa3"},
            SimpleNamespace(linear_key_head_dim=4),
            "other than triton",
        ),
    ],
)
def test_risk_of_a_hybrid_model_is_named(changed: dict[str, object], config: object, said: str) -> None:
    """Which layers, which kernels, which cache: the refusal says what is not proven (sglang#36548)."""
    risk = hybrid_risk(server_args(**changed), config) or "no risk"
    assert said in risk or (not RECURRENT_LAYERS_RAN and "not in a whole engine" in risk)


def test_gdn_layers_on_triton_are_served() -> None:
    """What `scripts/gpu_prove hybrid` has shown needs no flag; in other releases nothing of it was."""
    risk = hybrid_risk(server_args(), SimpleNamespace(text_config=SimpleNamespace(linear_key_head_dim=4)))
    assert (risk is None) == RECURRENT_LAYERS_RAN


def test_recurrent_states_beyond_the_memory_are_refused_with_a_budget_that_fits() -> None:
    """48 requests x 65 nodes x 1 MiB are 3 GiB (sglang#34096)."""

    def check(gib: float, **changed: object) -> None:
        publish(server_args(**changed))
        gates.check_recurrent_memory(2**20, gib)

    check(3.1)
    check(0.5, max_mamba_cache_size=1)
    check(0.0, speculative_algorithm="DFLASH")
    with pytest.raises(ValueError, match=r"65 nodes of 48 requests need 3\.0 GiB.*at most (\d+) fits") as refused:
        check(1.0)
    check(1.0, speculative_ddtree_budget=int(str(refused.value).split("at most ")[1].split()[0]))


def graph_error(budget: int, sizes: tuple[int, ...] = (1, 8, 48), **changed: object) -> str:
    """What the check says about the graphs of a runner with one budget, empty when they fit."""
    publish(server_args(speculative_ddtree_budget=budget))
    width, max_bs = budget + 1, sizes[-1]
    lane_batch_sizes(runner(**changed), list(sizes), width)
    try:
        gates.prepare_graph_buffers(backend(width), max_bs, max_bs * width, torch.zeros(0))
    except ValueError as error:
        return str(error)
    return ""


def test_budget_beyond_graph_memory_is_refused_with_one_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The named budget fits; the text names batch size, width and need."""
    gpu_with(monkeypatch, 4 * 2**30)
    error = graph_error(512)
    assert "48 requests of 513 tokens" in error
    fits = int(error.split("at most ")[1].split()[0])
    assert 1 < fits < 512
    assert graph_error(fits) == ""


def test_memory_that_the_drafter_will_need_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first worker loads it behind the target's graphs: a start passed and ran out of memory there."""
    gpu_with(monkeypatch, 6 * 2**30)
    assert graph_error(64) == ""
    monkeypatch.setattr(gates, "promised_bytes", lambda _: 4 * 2**30)
    error = graph_error(64)
    assert "2.0 GiB are free beside the drafter's weights and KV (4.0 GiB)" in error
    assert "--mem-fraction-static" in error
    fits = int(error.split("at most ")[1].split()[0])
    assert 1 < fits < 64
    assert graph_error(fits) == ""


def test_graph_memory_counts_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 152k tokens of vocabulary the logits alone are 0.6 MiB a node: 48 x 65 of them do not fit into 1.8 GiB."""
    gpu_with(monkeypatch, 1.8 * 2**30)
    assert "attention buffers, logits and hidden states" in graph_error(64)


def test_graph_memory_counts_the_hidden_states_of_every_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five layers of 4096 are 40 KiB a node, 0.9 GiB for graphs of 1 to 20 requests and every second one up to 48."""
    gpu_with(monkeypatch, 6 * 2**30)
    every = (*range(1, 20), *range(20, 50, 2))
    assert graph_error(64) == ""
    fits = int(graph_error(64, every).split("at most ")[1].split()[0])
    assert 48 < fits < 64
    assert graph_error(fits, every) == ""
    assert graph_error(fits + 1, every) != ""


def test_memory_that_pytorch_has_cached_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks in the allocator's cache are reused before the driver is asked."""
    gpu_with(monkeypatch, 0)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 40 * 2**30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 10 * 2**30)
    assert graph_error(64) == ""


def test_draft_runner_is_not_checked_for_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft's graphs are as wide as the block, whatever the budget; those of the tree's own width as well."""
    gpu_with(monkeypatch, 0)
    assert graph_error(15, is_draft_worker=True) == ""
    assert graph_error(15) != ""
    publish(server_args())
    assert gates.prepare_graph_buffers(backend(16), 48, 48 * 16, torch.zeros(3)).numel() == 3


def pool_of(size: int, *, page_size: int = 1, **changed: object) -> SimpleNamespace:
    """A target with a KV pool of so many slots."""
    publish(server_args(**changed))
    return SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(size=size), page_size=page_size)


def test_longest_request_leaves_room_for_its_step() -> None:
    """A pool of 264 and a step of 65: no request of 200 tokens is admitted, to be aborted in its last steps."""
    held = held_slots(65, 1)

    assert longest_request(pool_of(264), 263) == 264 - held
    assert longest_request(pool_of(100_000), 4095) == 4095
    assert longest_request(pool_of(264, speculative_algorithm="DFLASH"), 263) == 263


def test_longest_request_leaves_room_for_the_pages_of_its_step() -> None:
    """A step of 65 slots takes up to two pages of 64 beyond those that the request holds."""
    assert longest_request(pool_of(320, page_size=64), 319) == 320 - held_slots(65, 64)
    assert held_slots(65, 64) >= 2 * 64


def test_pool_without_room_for_one_step_is_refused() -> None:
    """The text names what is held, the pool and the ways out."""
    with pytest.raises(ValueError, match=r"holds \d+ KV slots.*holds 66 tokens.*budgets.*--mem-fraction-static"):
        longest_request(pool_of(66), 65)
    auto = {"speculative_ddtree_budget": "auto", "speculative_num_draft_tokens": 65}
    with pytest.raises(ValueError, match=r"holds 66 tokens\. Use a small --speculative-ddtree-budget alone, lower"):
        longest_request(pool_of(66, **auto), 65)


def test_kv_indices_have_one_row_a_request() -> None:
    """Tree verify reads a row of prefix slots per request, not per node; an uncounted step may pass the context."""
    publish(server_args())
    buffer = gates.prepare_graph_buffers(backend(), 2, 2 * 65, None)
    assert buffer is not None
    assert buffer.shape == (2 * (131072 + 16),)


@pytest.mark.parametrize(("algorithm", "count"), [("DDTREE", 2), ("DFLASH", 0)])
def test_the_attention_kernel_is_chosen_with_ddtree_only(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, count: int
) -> None:
    """For every backend that prepares for graphs, a drafter's or a narrower lane's with a buffer from elsewhere too."""
    chosen: list[object] = []
    monkeypatch.setattr(gates, "use_tree_attention", chosen.append)
    publish(server_args(speculative_algorithm=algorithm))
    backends_of_both = [backend(), backend(16)]
    gates.prepare_graph_buffers(backends_of_both[0], 2, 2 * 65, None)
    gates.prepare_graph_buffers(backends_of_both[1], 2, 2 * 16, torch.zeros(3))
    assert chosen == backends_of_both[:count]


def test_graph_mask_holds_a_full_batch_at_the_end_of_the_context() -> None:
    """Every request a block past the last position needs its width on top, more than SGLang's own size."""
    publish(server_args())
    small = backend(9)
    small.max_context_len = 32
    assert gates.grow_graph_mask(small, 3 * 9).numel() >= 3 * 9 * (31 + 16 + 9)


def test_flashinfer_rows_hold_prefix_and_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer reads a slot for the prefix and for every node; a budget that does not fit is refused by its name."""
    publish(server_args())
    small = SimpleNamespace(max_context_len=32, kv_indptr=[torch.zeros(1)])
    buffer = gates.prepare_flashinfer_buffers(small, 3, 3 * 65, None)
    assert buffer is not None
    assert (buffer.dtype, buffer.numel()) == (torch.int32, 3 * (32 + 65))
    assert gates.prepare_flashinfer_buffers(small, 3, 3 * 65, buffer) is buffer
    gpu_with(monkeypatch, 2**20)
    plan(Planned(runner(), [1, 3]))
    with pytest.raises(ValueError, match="3 requests of 65 tokens"):
        gates.prepare_flashinfer_buffers(small, 3, 3 * 65, None)


def test_flash_attention_is_checked_for_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of slots per node, page tables and logits have to fit; the draft's graphs are not checked."""
    publish(server_args())
    gpu_with(monkeypatch, 2**30)
    plan(Planned(runner(), [1, 2]))
    gates.check_flash_attention_buffers(backend(), 2, 2 * 65)
    gpu_with(monkeypatch, 2**20)
    with pytest.raises(ValueError, match="2 requests of 65 tokens"):
        gates.check_flash_attention_buffers(backend(), 2, 2 * 65)
    gates.check_flash_attention_buffers(backend(), 2, 2 * 16)


def test_other_algorithms_keep_their_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without DDTREE nothing is checked, grown or replaced."""
    gpu_with(monkeypatch, 0)
    publish(server_args(speculative_algorithm="DFLASH"))
    triton = backend()
    assert gates.prepare_graph_buffers(triton, 48, 48 * 65, None) is None
    assert gates.prepare_flashinfer_buffers(triton, 48, 48 * 65, None) is None
    gates.check_flash_attention_buffers(triton, 48, 48 * 65)
    assert gates.grow_graph_mask(triton, 48 * 65) is triton.cuda_graph_custom_mask
    assert extra_draft_columns(server_args(speculative_algorithm="DFLASH")) == 0


@pytest.mark.parametrize(("budget", "columns"), [(1, 14), (15, 0), (64, 0)])
def test_request_rows_hold_the_wider_of_draft_and_tree(budget: int, columns: int) -> None:
    """A budget below the block leaves the draft wider: its extra columns keep it out of the next request's row."""
    assert extra_draft_columns(server_args(speculative_ddtree_budget=budget)) == columns
