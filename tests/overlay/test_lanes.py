# SPDX-License-Identifier: Apache-2.0
"""Lanes: the batch sizes they are captured for, the buffers they share, what they cost, which one a step takes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.server_args import set_global_server_args_for_scheduler
from sglang.srt.speculative.ddtree import graph_memory, lane_bytes, lane_sizes
from sglang.srt.speculative.ddtree import lanes as lanes_module
from sglang.srt.speculative.ddtree.budgets import budget_list, budgets, default_budgets
from sglang.srt.speculative.ddtree.choosing import Choosing, check_wish, override_of, tree_shape
from sglang.srt.speculative.ddtree.lane_parts import replay_of
from sglang.srt.speculative.ddtree.lanes import Lane, Lanes, lend_buffers
from sglang.srt.speculative.ddtree.memory import graph_tensors, held_once, lane_memory
from sglang.srt.speculative.ddtree.promised import promised_bytes
from sglang.srt.speculative.ddtree.round_times import Choice
from tests.support.variants import variant


SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 40, 48]
EVERYTHING = ("cuda_graph_",)


def arguments(budget: object = "auto", listed: object = None, **changed: object) -> SimpleNamespace:
    """Resolved arguments: block 16."""
    base: dict[str, object] = {
        "speculative_algorithm": "DDTREE",
        "speculative_ddtree_budget": budget,
        "speculative_ddtree_budgets": listed,
        "speculative_dflash_block_size": 16,
        "max_running_requests": 48,
    }
    return SimpleNamespace(**(base | changed))


def target(**changed: object) -> SimpleNamespace:
    """A target's model runner; on a CPU nothing limits its graphs but their use."""
    padded = SimpleNamespace(disable_cuda_graph_padding=False)
    base: dict[str, object] = {"is_draft_worker": False, "server_args": padded}
    return SimpleNamespace(**(base | changed))


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
        sliding_window_size=None,
        num_draft_tokens=width,
    )
    backend.init_cuda_graph_state = lambda *sizes: TritonAttnBackend.init_cuda_graph_state(backend, *sizes)
    return backend


@pytest.fixture(autouse=True)
def published() -> SimpleNamespace:
    args = arguments()
    set_global_server_args_for_scheduler(args)
    return args


def test_default_lanes_have_the_chain_among_them():
    """With any block."""
    assert default_budgets(16) == (2, 4, 8, 15, 32, 64, 128)
    assert default_budgets(9) == (2, 4, 8, 32, 64, 128)


@pytest.mark.parametrize(("given", "found"), [("4,8", (4, 8)), ("8, 4 15", (8, 4, 15)), ([3, 9], (3, 9))])
def test_a_list_of_budgets_is_read_as_it_is_written(given: object, found: tuple[int, ...]):
    """On a command line, in Python, out of JSON."""
    assert budget_list(given) == found


@pytest.mark.parametrize("given", ["", "4,", "four", "-1,4", [], [2, None], [-1]])
def test_what_is_no_list_of_budgets_is_refused(given: object):
    """By its flag, with what was given."""
    with pytest.raises(ValueError, match="--speculative-ddtree-budgets"):
        budget_list(given)


def test_the_configured_budget_is_always_among_the_lanes():
    """Whatever else is listed, and twice does not count."""
    assert budgets(arguments(16, "4,8,16")) == (4, 8, 16)
    assert budgets(arguments(16, "4,8")) == (4, 8, 16)
    assert budgets(arguments("auto", [8, 4])) == (4, 8)


def test_default_lanes_of_auto_are_captured_for_steps_that_can_pay():
    """Up to 2080 nodes; the chain for every batch; above 4 requests not for every size."""
    sizes = {width: lane_sizes.lane_batch_sizes(target(), SIZES, width) for width in (3, 16, 65, 129)}

    assert sizes[16] == [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 30, 40, 48]
    assert sizes[3] == sizes[16]
    assert sizes[65][-1] == 32
    assert sizes[129][-1] == 16


def test_without_padding_no_batch_size_is_left_out():
    """A batch of 7 would be padded to no graph of 8; up to the lane's largest batch each size has its own."""
    unpadded = target(server_args=SimpleNamespace(disable_cuda_graph_padding=True))

    assert lane_sizes.lane_batch_sizes(unpadded, SIZES, 16) == SIZES
    assert lane_sizes.lane_batch_sizes(unpadded, SIZES, 129) == [size for size in SIZES if size <= 16]


def test_the_chain_is_captured_for_every_batch_however_large():
    """DFLASH's own step has graphs there."""
    assert lane_sizes.lane_batch_sizes(target(), [*SIZES, 160, 256], 16)[-1] == 256


def test_listed_budgets_are_captured_for_whatever_fits(published: SimpleNamespace):
    """Who lists them measures them; a GPU's memory is the limit."""
    published.speculative_ddtree_budgets = "8,256"

    assert lane_sizes.lane_batch_sizes(target(), SIZES, 257) == SIZES


def test_a_drafter_and_a_budget_alone_keep_all_batch_sizes(published: SimpleNamespace):
    """As without lanes."""
    assert lane_sizes.lane_batch_sizes(target(is_draft_worker=True), SIZES, 129) == SIZES
    published.speculative_ddtree_budget, published.speculative_ddtree_budgets = 128, None

    assert lane_sizes.lane_batch_sizes(target(), SIZES, 129) == SIZES


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, free: int) -> SimpleNamespace:
    """A target of 1 MiB a node on a GPU with so many bytes free."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(lane_sizes, "free_bytes", lambda: free)
    monkeypatch.setattr(lane_sizes, "promised_bytes", lambda _: 0)
    node = lane_bytes.NodeBytes(buffers=2**20, logits=0, work=0, hidden=0, request=0)
    monkeypatch.setattr(lane_bytes.NodeBytes, "of", lambda _: node)
    monkeypatch.setattr(lane_sizes, "get_tp_group", lambda: SimpleNamespace(world_size=1, rank_in_group=0))
    return target()


def test_a_wide_lane_gets_the_batches_that_half_of_the_free_memory_holds(
    monkeypatch: pytest.MonkeyPatch, published: SimpleNamespace
):
    """The first answer holds: what is captured meanwhile takes memory."""
    published.speculative_ddtree_budgets = "8,256"
    runner = on_a_gpu(monkeypatch, 4 * 2**30)

    assert lane_sizes.lane_batch_sizes(runner, SIZES, 257)[-1] == 7  # 2048 nodes
    monkeypatch.setattr(lane_sizes, "free_bytes", lambda: 0)
    assert lane_sizes.lane_batch_sizes(runner, SIZES, 9) == SIZES


def test_the_drafters_pool_is_not_free(monkeypatch: pytest.MonkeyPatch, published: SimpleNamespace):
    """The first worker captures the target's graphs before it loads the drafter, for whose pool room was left."""
    published.speculative_ddtree_budgets = "8,256"
    runner = on_a_gpu(monkeypatch, 4 * 2**30)
    kv = [torch.empty((2**20, 128), dtype=torch.uint8, device="meta") for _ in range(8)]  # 1 GiB a side
    runner.token_to_kv_pool, runner.dflash_draft_num_layers = SimpleNamespace(k_buffer=kv, v_buffer=kv), 4
    monkeypatch.setattr(lane_sizes, "promised_bytes", promised_bytes)

    assert lane_sizes.lane_batch_sizes(runner, SIZES, 257)[-1] == 5  # half of 4 - 1 GiB: 1536 nodes


def test_a_lane_that_does_not_hold_one_request_is_refused_with_what_does(
    monkeypatch: pytest.MonkeyPatch, published: SimpleNamespace
):
    """By the budget, before anything is captured."""
    published.speculative_ddtree_budgets = "8,256"

    with pytest.raises(ValueError, match=r"budget of 256 do not fit.*at most 99 fits alone"):
        lane_sizes.lane_batch_sizes(on_a_gpu(monkeypatch, 200 * 2**20), SIZES, 257)


def test_narrow_lanes_lie_in_the_buffers_of_the_widest():
    """Together they take what it takes alone, and each sees the sizes that it asked for."""
    wide, narrow = triton_backend(65), triton_backend(9)
    wide.init_cuda_graph_state(4, 4 * 65)
    alone = held_once(graph_tensors(wide, *EVERYTHING))
    own = triton_backend(9)
    own.init_cuda_graph_state(4, 4 * 9)

    lend_buffers(narrow, [wide])
    narrow.init_cuda_graph_state(4, 4 * 9)

    assert held_once([*graph_tensors(wide, *EVERYTHING), *graph_tensors(narrow, *EVERYTHING)]) == alone
    assert [t.shape for t in graph_tensors(narrow, *EVERYTHING)] == [t.shape for t in graph_tensors(own, *EVERYTHING)]
    assert narrow.cuda_graph_custom_mask.data_ptr() == wide.cuda_graph_custom_mask.data_ptr()


def test_a_lane_keeps_a_buffer_that_no_other_has_room_for():
    """A narrow lane is captured for more requests."""
    wide, narrow = triton_backend(9), triton_backend(3)
    wide.init_cuda_graph_state(2, 2 * 9)

    lend_buffers(narrow, [wide])
    narrow.init_cuda_graph_state(48, 48 * 3)

    assert narrow.cuda_graph_attn_lse.shape[0] == 48 * 3
    assert narrow.cuda_graph_attn_lse.data_ptr() != wide.cuda_graph_attn_lse.data_ptr()


def test_the_table_counts_the_bytes_of_real_buffers():
    """Every graph buffer once, the logits, and the KV of the slots that a request holds."""
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

    assert (found.budget, found.requests, found.held) == (16, 4, 17)
    assert found.kv_request == 17 * 2 * 6 * 2 * 4 * 4
    assert found.kv_all == 48 * found.kv_request
    assert sum(found.buffers.values()) == sum(t.nbytes for t in graph_tensors(backend, *EVERYTHING))
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


class FakeRunner:
    """A model runner whose lanes are names."""

    def __init__(self) -> None:
        self.server_args = SimpleNamespace(speculative_num_draft_tokens=41)
        self.attn_backend = "backend of 41"
        self.graph_runner = None
        self.init_new_workspace = False

    def _get_attention_backend(self, init_new_workspace: bool = False) -> str:
        assert init_new_workspace
        return f"backend of {self.server_args.speculative_num_draft_tokens}"


@pytest.fixture
def lanes(published: SimpleNamespace) -> Lanes:
    """Three, of an engine without graphs."""
    published.speculative_ddtree_budget, published.speculative_ddtree_budgets = 40, "8,15"
    return Lanes(FakeRunner(), None)


def test_each_lane_is_built_where_its_width_is_the_only_one(lanes: Lanes):
    """And the model runner has its own backend again after `rest`."""
    runner, seen = lanes._model_runner, []
    for width in lanes.widths:
        lanes.use(width)
        seen.append(runner.attn_backend)
    lanes.rest()

    assert seen == ["backend of 9", "backend of 16", "backend of 41"]
    assert runner.attn_backend == "backend of 41"
    assert runner.server_args.speculative_num_draft_tokens == 41


def test_a_graph_is_found_by_its_batch_size():
    """A runner of 0.5.13 has no name for the keys of its graphs; `auto` times graphs at start-up in every release."""
    replayed: list[int] = []
    graphs = {size: SimpleNamespace(replay=lambda size=size: replayed.append(size)) for size in (1, 4)}

    replay_of(SimpleNamespace(graphs=graphs), 4)()

    assert replayed == [4]


def asks(*wishes: object) -> list[SimpleNamespace]:
    """Requests that ask for a budget each, or for nothing."""
    params = [None if wish is None else {"ddtree_budget": wish, "__req__": object()} for wish in wishes]
    return [SimpleNamespace(sampling_params=SimpleNamespace(custom_params=param)) for param in params]


@pytest.mark.parametrize(
    ("wishes", "found"),
    [((8, 8), 8), ((8, 15), None), ((8, None), None), ((None, None), None), (("chain",), "chain"), ((), None)],
)
def test_a_wish_holds_while_every_request_has_it(wishes: tuple[object, ...], found: object):
    """One that joins without it ends it."""
    assert override_of(asks(*wishes)) == found


def test_a_step_takes_what_is_asked_for_or_what_is_configured(lanes: Lanes, published: SimpleNamespace):
    """The chain is the lane of the block's own width."""
    choosing = Choosing(lanes, published)

    def chosen(*wishes: object) -> tuple[int, str]:
        mode = SimpleNamespace(is_extend=lambda: False, is_idle=lambda: False)
        choosing.begin(SimpleNamespace(forward_mode=mode, is_extend_in_batch=False, reqs=asks(*wishes)))
        return choosing.choose()

    assert chosen(8, 8) == (9, "tree")
    assert chosen("chain") == (16, "chain")
    assert chosen(8, 15) == (41, "tree")
    assert chosen(77) == (41, "tree")
    # Engines with graphs: a client does not choose a step of any size.
    choosing._lanes = SimpleNamespace(widths=lanes.widths, fits=lambda width, count: width * count <= 20)
    assert chosen(8, 8) == (9, "tree")
    assert chosen(8, 8, 8) == (41, "tree")
    assert chosen("chain", "chain") == (41, "tree")


@pytest.mark.parametrize(
    ("widths", "planned", "taken"),
    [
        ((9, 16, 41), Choice(41), Choice(16)),
        ((9, 16, 41), Choice(9), Choice(9)),
        ((9, 16, 41), Choice(16, "chain"), Choice(16, "chain")),
        ((1, 41), Choice(41), Choice(1, "none")),
        ((33, 41), Choice(41), Choice(33)),
    ],
)
def test_a_batch_that_no_graph_serves_takes_nothing_wider_than_the_chain(
    published: SimpleNamespace, widths: tuple[int, ...], planned: Choice, taken: Choice
):
    """The plan is one for fewer requests, whose wide trees come out of a graph; nothing is learned of the others."""
    began: list[int] = []
    interrupted: list[bool] = []
    published.speculative_ddtree_budget = "auto"
    choosing = Choosing(SimpleNamespace(widths=widths, fits=lambda _, count: count <= 4), published)
    choosing._auto = SimpleNamespace(
        chooser=SimpleNamespace(choose=lambda _: planned),
        begin=lambda count: began.append(count) or planned,
        interrupt=lambda: interrupted.append(True),
    )
    mode = SimpleNamespace(is_extend=lambda: False, is_idle=lambda: False)
    for count in (4, 5):
        reqs = asks(*[None] * count)
        choosing.begin(SimpleNamespace(forward_mode=mode, is_extend_in_batch=False, reqs=reqs))
        assert choosing.choose() == (planned if count == 4 else taken)
    assert (began, interrupted) == ([4], [True])


def test_the_chain_is_a_tree_of_first_choices():
    """Whatever caps and seeds the trees have."""
    assert tree_shape(16, "chain", 4, chain_seed=False) == (15, 1, True)
    assert tree_shape(9, "tree", 4, chain_seed=False) == (8, 4, False)
    assert tree_shape(9, "tree", None, chain_seed=True) == (8, 8, True)


@pytest.mark.parametrize("wish", [8, 15, 40, "chain", None])
def test_a_request_may_ask_for_what_is_there(wish: object):
    """A budget of a lane, the chain, or nothing."""
    request = SimpleNamespace(sampling_params={"custom_params": {"ddtree_budget": wish}})

    check_wish(arguments(40, "8,15"), request)


@pytest.mark.parametrize("wish", [9, "8", 8.0, True, "tree", [8]])
def test_a_request_that_asks_for_something_else_is_refused(wish: object):
    """With what it may ask for."""
    request = SimpleNamespace(sampling_params={"custom_params": {"ddtree_budget": wish}})

    with pytest.raises(ValueError, match='lanes for 8, 15, 40, or "chain"'):
        check_wish(arguments(40, "8,15"), request)


def test_the_chain_cannot_be_asked_for_without_its_lane():
    """And the text says which budget it needs."""
    request = SimpleNamespace(sampling_params={"custom_params": {"ddtree_budget": "chain"}})

    with pytest.raises(ValueError, match='"chain" needs 15 among them'):
        check_wish(arguments(40, "8"), request)
