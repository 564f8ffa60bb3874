# SPDX-License-Identifier: Apache-2.0
"""Which arms a round of the decoding benchmark holds when the time does not hold all, and which engines a GPU."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest


sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import decode_arms
import decode_plan
from decode_arms import Arm


ARMS = [Arm("plain", "plain"), Arm("DFLASH", "dflash"), Arm("DDTREE auto", "ddtree")]
ARMS += [Arm(f"DDTREE {budget}", "ddtree", budget) for budget in (8, 32, 128)]


@pytest.fixture
def options() -> argparse.Namespace:
    found = {"concurrency": "1,16", "singles": 4, "seconds": 1.0, "prompt_tokens": 100, "tokens": 48, "cpu": False}
    return argparse.Namespace(**found, rounds=5, contenders=10, limit=500, settle=2, without_calibration=False)


@pytest.fixture
def plan(options: argparse.Namespace) -> decode_plan.Plan:
    """Every cell takes a second."""
    plan = decode_plan.Plan(options)
    for size in (1, 16):
        for arm in ARMS:
            plan.note(size, arm, 1.0)
    return plan


CELLS = [(size, arm) for size in (1, 16) for arm in ARMS]


def measurement(arm: str, size: int, tok_s: float) -> dict[str, Any]:
    found = {"tokens": 48, "seconds": size * 48 / tok_s, "steps": 16.0, "reached": 1.0, "span_seconds": 1.0}
    return {"round": 0, "concurrency": size, "arm": arm, "tok_s": tok_s, "step_ms": 10.0, "accept": 3.0, **found} | {
        "span_steps": 16
    }


def names(chosen: decode_plan.Round, size: int) -> list[str]:
    return [arm.name for arm in chosen.arms[size]]


def test_everything_that_fits_is_measured_in_the_order_of_the_arms(plan: decode_plan.Plan) -> None:
    """Twelve seconds a round."""
    chosen = plan.choose(CELLS, [], rounds=5, seconds=60)
    assert chosen.left_out == []
    assert names(chosen, 1) == names(chosen, 16) == [arm.name for arm in ARMS]


def test_the_first_round_may_be_longer_but_leaves_the_main_arms_their_rounds(plan: decode_plan.Plan) -> None:
    """Six seconds a round of main arms: of 33, the first may have 9; what is left out has most or fewest rows."""
    chosen = plan.choose(CELLS, [], rounds=5, seconds=33)
    assert chosen.seconds == 9
    assert names(chosen, 16)[:3] == ["plain", "DFLASH", "DDTREE auto"]
    assert chosen.left_out == ["DDTREE 32 at 16", "DDTREE 8 at 1", "DDTREE 128 at 16"]


def test_what_is_near_the_best_gets_the_rounds(plan: decode_plan.Plan) -> None:
    """By tokens per second beside DFLASH, at each concurrency by itself."""
    speeds = {1: {"DDTREE 8": 90, "DDTREE 32": 110, "DDTREE 128": 130}, 16: {"DDTREE 8": 900, "DDTREE 32": 500}}
    found = [measurement("DFLASH", size, 100 if size == 1 else 600) for size in speeds]
    found += [measurement(arm, size, speed) for size, several in speeds.items() for arm, speed in several.items()]
    chosen = plan.choose(CELLS, found, rounds=4, seconds=36)
    assert names(chosen, 1)[3:] == ["DDTREE 32", "DDTREE 128"]
    assert names(chosen, 16)[3:] == ["DDTREE 8"]


def test_main_arms_are_measured_even_where_the_time_is_too_short(plan: decode_plan.Plan) -> None:
    """The run says so, and goes on until the time is over."""
    chosen = plan.choose(CELLS, [], rounds=5, seconds=10)
    assert len(chosen.left_out) == 6
    assert names(chosen, 1) == ["plain", "DFLASH", "DDTREE auto"]


def test_what_was_not_measured_has_its_chance_behind_what_is_good(plan: decode_plan.Plan) -> None:
    """A first round that was too short for all says nothing about the others."""
    speeds = {"DFLASH": 100, "DDTREE 8": 50, "DDTREE 32": 95, "DDTREE auto": 100}
    chosen = plan.choose(CELLS, [measurement(arm, 1, speed) for arm, speed in speeds.items()], rounds=4, seconds=36)
    assert names(chosen, 1)[3:] == ["DDTREE 32", "DDTREE 128"]
    assert names(chosen, 16)[3:] == ["DDTREE 8"]


def test_beside_a_control_chains_are_main_arms(plan: decode_plan.Plan) -> None:
    """They say how far processes differ, in every round."""
    chain = Arm("DDTREE chain, uncalibrated", "uncalibrated", "chain")
    assert not plan.is_main(chain.name)
    plan.options.without_calibration = True
    chosen = plan.choose([*CELLS, (1, chain)], [], rounds=5, seconds=0)
    assert names(chosen, 1) == ["plain", "DFLASH", "DDTREE auto", chain.name]


@pytest.mark.parametrize("release", ["0.5.11", "0.5.17"])
def test_the_guess_is_no_shorter_than_what_was_measured(options: argparse.Namespace, release: str) -> None:
    """What the first round of a run took on an H200, a guess must hold, and not much more."""
    file = Path(__file__).resolve().parents[2] / f"benchmarks/results/{release}-8b.json"
    result = json.loads(file.read_text())
    options.concurrency, options.seconds, options.prompt_tokens = "1,2,4,8,16,32,48", 0.8, 192
    given = result["command"].split()
    options.singles = int(given[given.index("--singles") + 1])
    plan = decode_plan.Plan(options)
    first = [entry for entry in result["measurements"] if entry["round"] == 0]
    took = result["phases"]["round 1 of 5"] - result["phases"]["warmed up"]
    arms = {arm["name"]: Arm(**arm) for arm in result["arms"]}
    assert took < plan.total([(entry["concurrency"], arms[entry["arm"]]) for entry in first]) < 1.35 * took


def test_what_was_measured_corrects_the_guess_of_the_rest(options: argparse.Namespace) -> None:
    """With a margin where it was faster: what is left out for a while must not cost a main arm its last round."""
    plan = decode_plan.Plan(options)
    arm, other = ARMS[2], ARMS[4]
    guess = plan.guess(16, other)
    for share, expected in ((0.5, 0.5 * decode_plan.CAUTION), (0.9, 1), (3, 3)):
        plan = decode_plan.Plan(options)
        plan.note(1, arm, share * plan.guess(1, arm))
        assert plan.cost(16, other) == pytest.approx(expected * guess)
        assert plan.cost(1, arm) == pytest.approx(share * plan.guess(1, arm))


def test_a_guess_knows_steps_that_are_short_and_the_longest_measurement(options: argparse.Namespace) -> None:
    """Plain decoding needs a step for each token, wide trees of many requests the whole time of a measurement."""
    plan = decode_plan.Plan(options)
    overhead = plan.prefill[16] + decode_plan.OVERHEAD
    assert plan.guess(16, ARMS[0]) == pytest.approx(48 * 7.32e-3 + overhead)
    assert plan.guess(16, Arm("DDTREE 0", "ddtree", 0)) == plan.guess(16, ARMS[0])
    assert plan.guess(16, Arm("DDTREE 15", "ddtree", 15)) == pytest.approx(48 / 2.5 * 1.2 * 12.12e-3 + overhead)
    assert plan.guess(16, Arm("DDTREE 256", "ddtree", 256)) == pytest.approx(1.0 + overhead)


def test_a_sketch_says_whether_the_rounds_fit(options: argparse.Namespace) -> None:
    """With much time, with less, and with too little."""
    text = "all arms fit into all 5 rounds\n  behind them about "
    found = [(400, f"{text}10 of 10"), (230, f"{text}3 of 10"), (200, "every round holds the main arms")]
    for limit, said in (*found, (172, "TOO SHORT: 2 rounds")):
        options.limit = limit
        assert said in decode_plan.sketch(options, ARMS, CELLS), decode_plan.sketch(options, ARMS, CELLS)


@pytest.mark.parametrize(
    ("arms", "engines", "names"),
    [
        ("", {"plain", "dflash", "ddtree", "uncalibrated", "ddtree-more"}, None),
        (
            "DFLASH,auto,chain,block,63",
            {"dflash", "ddtree", "uncalibrated"},
            ["DFLASH", "DDTREE auto", "DDTREE auto, uncalibrated"]
            + [f"DDTREE {kind}{end}" for end in ("", ", uncalibrated") for kind in ("chain", 7, 63)],
        ),
        ("plain,256", {"plain", "ddtree", "uncalibrated", "ddtree-more"}, ["plain", "DDTREE 256"]),
    ],
)
def test_only_the_arms_that_are_asked_for_are_measured(
    options: argparse.Namespace, tmp_path: Path, arms: str, engines: set[str], names: list[str] | None
) -> None:
    """Of both engines; without an arm, plain decoding, DFLASH and further budgets have no engine."""
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft/config.json").write_text('{"block_size": 8}')
    more = {"site": tmp_path, "plan": True, "budgets": "", "more": "16,256", "arms": arms, "without_calibration": True}
    vars(options).update(more)
    bench = decode_arms.Bench(options, tmp_path)
    bench.add_budgets(bench.expected())
    assert set(bench.engines) == engines
    assert names is None or [arm.name for arm in bench.arms] == names
    assert len(bench.arms) == (18 if names is None else len(names))


@pytest.mark.parametrize(("budgets", "sizes"), [("", [1, 8]), ("8,64", [1, 8, 32])])
def test_listed_lanes_have_graphs_for_every_batch(options: argparse.Namespace, budgets: str, sizes: list[int]) -> None:
    """Default ones up to a number of rows."""
    vars(options).update({"budgets": budgets, "rows": 1040})
    arm, most = Arm("DDTREE 64", "ddtree", 64), decode_arms.most_rows(options)
    assert [size for size in (1, 8, 32) if arm.served(size, 8, most)] == sizes


@pytest.mark.parametrize(("budget", "sizes"), [(8, [1, 8, 32]), (64, [1, 8]), (128, [1, 8]), (256, [1])])
def test_budgets_of_the_further_engine_are_measured_where_they_have_graphs(budget: int, sizes: list[int]) -> None:
    """The widest for few requests only: many are never the best, and take long."""
    arm = Arm(f"DDTREE {budget}", "ddtree-more", budget)
    assert [size for size in (1, 8, 32) if arm.served(size, 8, 1040)] == sizes
    assert Arm("DDTREE 128", "ddtree-more", 128).served(8, 8, float("inf"))
    assert not Arm("DDTREE 128", "ddtree-more", 128).served(16, 8, float("inf"))


@pytest.mark.parametrize(("more", "sizes", "configured"), [("8,64,256", [1, 16], 64), ("128,256", [1], 256)])
def test_the_further_engine_has_room_for_its_widest_trees(
    options: argparse.Namespace, tmp_path: Path, more: str, sizes: list[int], configured: int
) -> None:
    """Every request holds two steps of the widest; the configured budget has graphs for every batch."""
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft/config.json").write_text('{"block_size": 8}')
    vars(options).update({"site": tmp_path, "plan": True, "budgets": "", "more": more, "arms": ""})
    engine = decode_arms.Bench(options, tmp_path).engines["ddtree-more"]
    assert engine["speculative_ddtree_budget"] == configured
    assert engine["max_running_requests"] == sizes[-1]
    assert engine["max_total_tokens"] >= 16 * (100 + 4 * 48 + 2 * 257)


@pytest.mark.parametrize(("left", "seconds"), [(400, 2), (24, 1.5), (-3, 0)])
def test_settling_leaves_most_of_a_short_run_to_the_rounds(
    options: argparse.Namespace, left: float, seconds: float
) -> None:
    """Two concurrencies and two engines; without `auto` nothing settles."""
    assert decode_plan.settling(options, 2, left) == seconds
    assert decode_plan.settling(options, 0, left) == 0


def test_the_further_engine_has_only_what_the_main_one_lacks(options: argparse.Namespace, tmp_path: Path) -> None:
    """An engine whose budgets are all measured elsewhere is none: it would take a third of the GPU for nothing."""
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft/config.json").write_text('{"block_size": 8}')
    vars(options).update({"site": tmp_path, "plan": True, "more": "8,64,128", "arms": ""})
    vars(options).update({"budgets": "8,64,128"})
    assert "ddtree-more" not in decode_arms.Bench(options, tmp_path).engines
    vars(options).update({"budgets": "64"})
    assert decode_arms.Bench(options, tmp_path).engines["ddtree-more"]["speculative_ddtree_budgets"] == [8, 128]


def test_engines_that_the_gpu_cannot_hold_are_left_out_in_order(tmp_path: Path) -> None:
    """Budgets of an engine of their own first; the main ones never."""
    for part in ("target", "draft"):
        (tmp_path / part).mkdir()
        sizes = {"num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 10}
        (tmp_path / part / "config.json").write_text(json.dumps(sizes))
        with (tmp_path / part / "model.safetensors").open("wb") as file:
            file.truncate(10 << 30)
    arguments = {"model_path": str(tmp_path / "target"), "max_total_tokens": 1 << 18}
    draft = {"speculative_draft_model_path": str(tmp_path / "draft")}
    jobs = {"plain": arguments} | dict.fromkeys(("dflash", "ddtree", "uncalibrated"), arguments | draft)
    jobs |= {"ddtree-more": arguments | draft}
    assert decode_arms.model_bytes(arguments) == (10 << 30) + (40960 << 18)
    sizes = {name: decode_arms.BESIDE.get(name, 8 << 30) + decode_arms.model_bytes(jobs[name]) for name in jobs}
    every = sum(sizes.values())
    assert decode_arms.too_large(jobs, every) == []
    assert decode_arms.too_large(jobs, every - 1) == ["ddtree-more"]
    assert decode_arms.too_large(jobs, every - sizes["ddtree-more"] - 1) == ["ddtree-more", "uncalibrated"]
    assert decode_arms.too_large(jobs, 0) == ["ddtree-more", "uncalibrated"]
