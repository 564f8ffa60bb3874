# SPDX-License-Identifier: Apache-2.0
"""What lanes hold of a GPU's memory, and what they share."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.speculative.ddtree import graph_memory, lane_bytes
from sglang.srt.speculative.ddtree import lanes as lanes_module
from sglang.srt.speculative.ddtree.held_slots import held_slots
from sglang.srt.speculative.ddtree.lanes import Lane, lend_buffers
from sglang.srt.speculative.ddtree.memory import GRAPH_BUFFERS, graph_tensors, held_once, lane_memory
from tests.overlay.lane_standins import arguments, target
from tests.overlay.publishing import publish
from tests.support.variants import variant


EVERYTHING = ("cuda_graph_", "_verify_mask")
#: Bytes of a flag of which newer releases have one in each backend.
FLAG = 4


@pytest.fixture(autouse=True)
def published() -> SimpleNamespace:
    return publish(arguments())


def triton_backend(width: int) -> SimpleNamespace:
    """What SGLang's backend allocates its graph buffers from: 2 heads of 4, a context of 64."""
    backend = SimpleNamespace(
        num_head=2,
        max_kv_splits=8,
        v_head_dim=4,
        swa_v_head_dim=None,
        device="cpu",
        max_context_len=64,
        skip_prefill=False,
        dllm_attention=None,
        use_sliding_window_kv_pool=False,
        is_draft_runner=False,
        lean_total_programs=3,
        lean_block_m=2,
        sliding_window_size=None,
        num_draft_tokens=width,
    )
    backend.init_cuda_graph_state = lambda *sizes: TritonAttnBackend.init_cuda_graph_state(backend, *sizes)
    return backend


def test_narrow_lanes_lie_in_the_buffers_of_the_widest():
    """Together they take what it takes alone, and each sees the sizes that it asked for."""
    wide, narrow = triton_backend(65), triton_backend(9)
    wide.init_cuda_graph_state(4, 4 * 65)
    alone = held_once(graph_tensors(wide, *EVERYTHING))
    own = triton_backend(9)
    own.init_cuda_graph_state(4, 4 * 9)

    lend_buffers(narrow, [wide])
    narrow.init_cuda_graph_state(4, 4 * 9)

    together = held_once([*graph_tensors(wide, *EVERYTHING), *graph_tensors(narrow, *EVERYTHING)])
    assert 0 <= together - alone <= FLAG
    assert [t.shape for t in graph_tensors(narrow, *EVERYTHING)] == [t.shape for t in graph_tensors(own, *EVERYTHING)]
    masks = [next(iter(graph_tensors(backend, *GRAPH_BUFFERS["mask"]))) for backend in (wide, narrow)]
    assert masks[0].data_ptr() == masks[1].data_ptr()


def test_a_lane_keeps_a_buffer_that_no_other_has_room_for():
    """A narrow lane is captured for more requests."""
    wide, narrow = triton_backend(9), triton_backend(3)
    wide.init_cuda_graph_state(2, 2 * 9)

    lend_buffers(narrow, [wide])
    narrow.init_cuda_graph_state(48, 48 * 3)

    assert narrow.cuda_graph_attn_lse.shape[0] == 48 * 3
    assert narrow.cuda_graph_attn_lse.data_ptr() != wide.cuda_graph_attn_lse.data_ptr()


def test_the_table_counts_the_bytes_of_real_buffers(published: SimpleNamespace):
    """Every graph buffer once, the logits, and the KV of the slots that a request holds."""
    published.speculative_num_draft_tokens = 17
    backend = triton_backend(17)
    backend.init_cuda_graph_state(4, 4 * 17)
    kv = [torch.zeros(9, 2, 4) for _ in range(3)]
    pool = SimpleNamespace(k_buffer=kv, v_buffer=kv)
    states = SimpleNamespace(intermediate_ssm=torch.zeros(5), intermediate_conv_window=[torch.zeros(7)], conv=kv)
    runner = target(
        page_size=1,
        max_running_requests=48,
        token_to_kv_pool=pool,
        req_to_token_pool=SimpleNamespace(mamba_pool=SimpleNamespace(mamba_cache=states)),
    )
    outputs = {size: SimpleNamespace(hidden_states=torch.zeros(size * 17, 6)) for size in (1, 2, 4)}
    graphs = SimpleNamespace(
        buffers=SimpleNamespace(next_token_logits_buffer=torch.zeros(4 * 17, 11)),
        output_buffers=outputs,
        backend=SimpleNamespace(_outputs=outputs),
    )

    found = lane_memory(Lane(17, backend, graphs, (1, 2, 4)), runner, runner)

    assert (found.budget, found.requests, found.held) == (16, 4, held_slots(17, 1))
    assert found.kv_request == found.held * 2 * 6 * 2 * 4 * 4
    assert found.kv_all == 48 * found.kv_request
    assert 0 <= sum(t.nbytes for t in graph_tensors(backend, *EVERYTHING)) - sum(found.buffers.values()) <= FLAG
    assert found.logits == 4 * 17 * 11 * 4
    assert found.hidden == (1 + 2 + 4) * 17 * 6 * 4
    assert found.states == 12 * 4


def test_the_bytes_of_a_node_are_those_that_the_backend_allocates():
    """What is checked before a start is what is allocated afterwards."""
    backend = triton_backend(17)
    backend.init_cuda_graph_state(1, 17)
    attention = backend.cuda_graph_attn_logits.nbytes + backend.cuda_graph_attn_lse.nbytes
    mask = 2 * (64 + 16 + 17)

    assert graph_memory.attention_bytes(backend) == attention // 17 + mask


@pytest.mark.parametrize(
    ("folder", "logits", "work"),
    [("first", 2064 + 2080, 2064 + 2080), ("second", 2064 + 2080 + 768, 2064 + 2080 + 2 * 768), ("0.5.15", 2080, 4144)],
)
def test_lanes_share_what_their_release_lets_them(folder: str, logits: int, work: int):
    """0.5.14 shares buffers of one size only and no memory to work in; before it one that has room, later one for all.

    A lane of more nodes than the one before it makes a buffer of its own; the smaller one stays.
    """
    nodes = [2064, 2080, 768, 768]

    assert variant(folder, "shared_graphs").logits_rows(nodes) == logits
    assert variant(folder, "shared_graphs").work_rows(nodes) == work


def test_every_graph_of_every_lane_keeps_its_hidden_states():
    """They lie in the graphs' memory as long as the graphs do, which is most of what many narrow lanes take."""
    node = lane_bytes.NodeBytes(buffers=0, logits=0, work=0, hidden=10, request=0)

    assert lane_bytes.lanes_bytes([(65, [1, 2]), (9, []), (3, [1, 2, 4])], node) == 10 * (65 * 3 + 3 * 7)


def test_buffers_of_lanes_with_room_are_counted_once():
    """As `lend_buffers` shares them: attention by nodes, KV indices by requests."""
    node = lane_bytes.NodeBytes(buffers=10, logits=0, work=0, hidden=0, request=1000)

    assert lane_bytes.lanes_bytes([(65, [1, 4]), (33, [1, 7]), (3, [48])], node) == 10 * 65 * 4 + 1000 * (4 + 7 + 48)


@pytest.mark.parametrize(
    "holder",
    [{"dflash_target_layer_ids": [1, 8]}, {"spec_aux_config": SimpleNamespace(dflash_target_layer_ids=[1, 8])}],
)
def test_hidden_states_are_those_of_the_layers_that_the_drafter_reads(holder: dict[str, object]):
    """Named by the model runner, from 0.5.16 on by a part of it; else as many as any drafter reads."""
    made = {"model_config": SimpleNamespace(hidden_size=64), "dtype": torch.bfloat16}

    assert graph_memory.hidden_bytes(SimpleNamespace(**made, **holder)) == 2 * 64 * 2
    assert graph_memory.hidden_bytes(SimpleNamespace(**made)) == 8 * 64 * 2


def test_memory_that_ends_while_a_lane_is_captured_names_the_ways_out(monkeypatch: pytest.MonkeyPatch):
    """Another fault stays what it is."""

    def fail(text: str) -> None:
        def capture(*_: object) -> None:
            raise RuntimeError(text)

        monkeypatch.setattr(lanes_module, "capture_graphs", capture)
        lanes_module._graphs_of(None, Lane(65, None, None))

    with pytest.raises(ValueError, match=r"budget of 64.*--speculative-ddtree-budgets.*--mem-fraction-static"):
        fail("Capture cuda graph failed: CUDA out of memory. Tried to allocate 2 GiB")
    with pytest.raises(RuntimeError, match="illegal"):
        fail("illegal address")
