# SPDX-License-Identifier: Apache-2.0
"""Which lanes there are, and for which batch sizes each gets graphs."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from sglang.srt.speculative.ddtree import lane_bytes, lane_sizes
from sglang.srt.speculative.ddtree.budgets import budget_list, budgets, default_budgets
from tests.overlay.lane_standins import arguments, target
from tests.overlay.publishing import publish
from tests.support.variants import variant


SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 40, 48]


@pytest.fixture(autouse=True)
def published() -> SimpleNamespace:
    return publish(arguments())


def test_default_lanes_have_the_chain_among_them():
    """With any block; a node more than it costs what it costs."""
    assert default_budgets(16) == default_budgets(8) == default_budgets(64) == (0, 2, 4, 7, 15, 24, 31, 63)
    assert default_budgets(10) == (0, 2, 4, 7, 9, 15, 24, 31, 63)
    assert default_budgets(15) == (0, 2, 4, 7, 14, 24, 31, 63)
    assert default_budgets(63) == (0, 2, 4, 7, 15, 24, 31, 62, 63)


@pytest.mark.parametrize("block_size", [2, 7, 8, 9, 15, 16, 25, 63, 64])
def test_the_benchmark_plans_with_the_default_lanes(monkeypatch: pytest.MonkeyPatch, block_size: int):
    """It says what a run takes where nothing is installed."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    assert importlib.import_module("decode_arms").default_lanes(block_size) == list(default_budgets(block_size))


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
    sizes = {width: lane_sizes.lane_batch_sizes(target(), SIZES, width) for width in (3, 16, 64, 129)}

    assert sizes[16] == [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 30, 40, 48]
    assert sizes[3] == sizes[16]
    assert sizes[64][-1] == 32
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
    runner.ddtree_drafter_bytes = 0
    monkeypatch.setattr(lane_sizes, "promised_bytes", variant("first", "promised").promised_bytes)

    assert lane_sizes.lane_batch_sizes(runner, SIZES, 257)[-1] == 5  # half of 4 - 1 GiB: 1536 nodes


def test_nor_is_what_its_weights_will_take(monkeypatch: pytest.MonkeyPatch):
    """As many bytes as its checkpoint has, and its keys' and values' weights again, which SGLang stacks."""
    promised = variant("first", "promised")
    folder = Path(__file__).resolve().parents[1] / "data/tiny_pair/draft"
    config = json.loads((folder / "config.json").read_text("utf-8"))
    of_config = SimpleNamespace(hf_config=SimpleNamespace(**config), dtype=torch.float32)
    asked: dict[str, object] = {}
    monkeypatch.setattr(
        promised.ModelConfig, "from_server_args", lambda _, **given: asked.update(given) or of_config, raising=True
    )
    written = SimpleNamespace(speculative_draft_model_path=str(folder), speculative_draft_model_revision="main")
    runner = target(server_args=written, dflash_target_layer_ids=[1, 2], tp_size=1, token_to_kv_pool=None)
    weights = load_file(folder / "model.safetensors")
    stacked = [w for name, w in weights.items() if name.endswith(("k_proj.weight", "v_proj.weight"))]

    assert promised.promised_bytes(runner) == sum(w.nbytes for w in (*weights.values(), *stacked))
    assert asked == {"model_path": str(folder), "model_revision": "main", "is_draft_model": True}
    halves = promised.drafter_parameters(of_config.hf_config, 2, 2)
    assert sum(halves) < sum(promised.drafter_parameters(of_config.hf_config, 2, 1))


def test_a_lane_that_does_not_hold_one_request_is_refused_with_what_does(
    monkeypatch: pytest.MonkeyPatch, published: SimpleNamespace
):
    """By the budget, before anything is captured."""
    published.speculative_ddtree_budgets = "8,256"

    with pytest.raises(ValueError, match=r"budget of 256 do not fit: lanes may take 0.1 GiB.*at most 99 fits"):
        lane_sizes.lane_batch_sizes(on_a_gpu(monkeypatch, 200 * 2**20), SIZES, 257)


def test_auto_that_does_not_fit_names_the_fixed_budget_that_does(
    monkeypatch: pytest.MonkeyPatch, published: SimpleNamespace
):
    """It is captured for every batch size, and may take all that is free: 3 requests of 65 nodes, 48 of 5 nodes."""
    for sizes, fits in (([1, 2, 3], 64), (SIZES, 4)):
        runner = on_a_gpu(monkeypatch, 250 * 2**20)
        with pytest.raises(ValueError, match=f"of 128 do not fit.*use --speculative-ddtree-budget {fits} alone, or"):
            lane_sizes.lane_batch_sizes(runner, sizes, 129)
        published.speculative_ddtree_budget = fits
        lane_sizes.lane_batch_sizes(runner, sizes, fits + 1)
        published.speculative_ddtree_budget = "auto"


#: An 8B model on Triton with a context of 32k, whose drafter reads 5 layers.
EIGHT_B = lane_bytes.NodeBytes(buffers=200_000, logits=607_744, work=607_744, hidden=40_960, request=2**18)


def configured_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, published: SimpleNamespace, budget: int, listed: str, gib: float
) -> SimpleNamespace:
    """That model with a configured budget among listed ones, and so much memory free."""
    published.speculative_ddtree_budget, published.speculative_ddtree_budgets = budget, listed
    runner = on_a_gpu(monkeypatch, int(gib * 2**30))
    monkeypatch.setattr(lane_bytes.NodeBytes, "of", lambda _: EIGHT_B)
    return runner


@pytest.mark.parametrize("gib", [5.6, 7, 9.5, 10.4])
def test_a_narrow_lane_beside_a_configured_one_costs_no_start(
    monkeypatch: pytest.MonkeyPatch, published: SimpleNamespace, gib: float
):
    """The configured budget takes 5.1 GiB with or without it; the narrow one lies in its buffers."""
    assert 5 < lane_bytes.lanes_bytes([(65, SIZES)], EIGHT_B) / 2**30 < 5.5
    runner = configured_on_a_gpu(monkeypatch, published, 64, "8,64", gib)

    assert lane_sizes.lane_batch_sizes(runner, SIZES, 65) == SIZES
    assert lane_sizes.lane_batch_sizes(runner, SIZES, 9) == SIZES


def test_a_narrow_lane_is_never_what_does_not_fit(monkeypatch: pytest.MonkeyPatch, published: SimpleNamespace):
    """Where the configured budget takes everything, the check of its own graphs says so."""
    runner = configured_on_a_gpu(monkeypatch, published, 64, "8,64", 5)

    assert lane_sizes.lane_batch_sizes(runner, SIZES, 9) == [1]
    assert lane_sizes.lane_batch_sizes(runner, SIZES, 65) == SIZES


def test_a_wide_lane_gets_half_of_what_the_configured_one_leaves(
    monkeypatch: pytest.MonkeyPatch, published: SimpleNamespace
):
    """The configured one gets every batch, whatever it takes."""
    runner = configured_on_a_gpu(monkeypatch, published, 64, "64,256", 9.5)

    kept = lane_sizes.lane_batch_sizes(runner, SIZES, 257)
    given = lane_bytes.lanes_bytes([(65, SIZES)], EIGHT_B)
    taken = [
        lane_bytes.lanes_bytes([(257, SIZES[:count]), (65, SIZES)], EIGHT_B) - given
        for count in (len(kept), len(kept) + 1)
    ]
    half = (9.5 * 2**30 - given) / 2

    assert kept == SIZES[: len(kept)]
    assert taken[0] <= half < taken[1]


def test_a_refusal_beside_a_configured_budget_names_one_that_is_served(
    monkeypatch: pytest.MonkeyPatch, published: SimpleNamespace
):
    """Beside it, not alone; and it is a narrower one."""
    with pytest.raises(
        ValueError, match=r"budget of 1000 do not fit beside those of 64.*at most (\d+) fits"
    ) as refused:
        lane_sizes.lane_batch_sizes(configured_on_a_gpu(monkeypatch, published, 64, "64,1000", 6), SIZES, 1001)
    fits = int(str(refused.value).split("at most ")[1].split()[0])

    assert 64 < fits < 1000
    for budget, kept in ((fits, [1]), (fits + 1, None)):
        runner = configured_on_a_gpu(monkeypatch, published, 64, f"64,{budget}", 6)
        if kept:
            assert lane_sizes.lane_batch_sizes(runner, SIZES, budget + 1) == kept
        else:
            with pytest.raises(ValueError, match=f"at most {fits} fits"):
                lane_sizes.lane_batch_sizes(runner, SIZES, budget + 1)
