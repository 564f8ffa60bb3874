# SPDX-License-Identifier: Apache-2.0
"""The order of the decoding benchmark, on engines that take a known time for a step: it ends with a whole report."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import decode_figures
import decode_rounds
from decode_engines import Arm


ARMS = [Arm("plain", "plain"), Arm("DFLASH", "dflash"), Arm("DDTREE auto", "ddtree"), Arm("DDTREE 15", "ddtree", 15)]
ACCEPTED = {"plain": 1, "dflash": 3, "ddtree": 4}


class Engine:
    """Answers like an engine that decodes steps of 10 ms, and takes `cost` seconds for it."""

    def __init__(self, folder: Path, name: str, cost: float) -> None:
        self.name, self.cost, self.stages = name, cost, folder / f"{name}.stages"
        self.asked: list[dict[str, Any]] = []

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if "info" in request:
            return {"ddtree_steps": {"15": len(self.asked)}}
        self.asked.append(request)
        time.sleep(self.cost)
        if self.stages.with_name(self.stages.name + ".on").exists():
            line = json.dumps({"batch": len(request["prompts"]), "width": 16, "ms": {"verify": 6.0}})
            self.stages.write_text(f"{line}\n" * 3)
        gain = ACCEPTED[self.name]
        steps = [[0.01 * at, "d", [1 + gain * at] * len(request["prompts"]), 0] for at in range(60)]
        return {"steps": steps, "memory": {}, "errors": []}


def run_of(tmp_path: Path, **changes: Any) -> decode_rounds.Run:
    (tmp_path / "prompts.json").write_text(json.dumps([[number] * 8 for number in range(64)]))
    options = {"pair": tmp_path, "out": tmp_path / "out.json", "prompt_tokens": 8, "tokens": 12, "seconds": 1.0}
    options |= {"concurrency": "1,4,16", "rounds": 3, "singles": 2, "settle": 0, "rows": 2080, "hopeless": 0.8}
    options |= {"stages": None, "limit": 100}
    run = decode_rounds.Run(argparse.Namespace(**options | changes), time.monotonic())
    run.result |= {"block": 16, "arms": [vars(arm) for arm in ARMS]}
    return run


@pytest.mark.parametrize("limit", [100, 5.4], ids=["enough time", "too little"])
def test_a_run_ends_with_a_report_whatever_time_it_has(tmp_path: Path, limit: float) -> None:
    """At other concurrencies than the default ones; what the time did not allow is named."""
    run = run_of(tmp_path, limit=limit)
    engines = {name: Engine(tmp_path, name, 0.0 if limit > 10 else 0.02) for name in ACCEPTED}
    started: Any = SimpleNamespace(engines=engines)
    decode_rounds.warm_up(run, started, ARMS)
    decode_rounds.rounds(run, started, ARMS, 16, reserve=0)
    decode_rounds.stages(run, started, ARMS, 16)
    run.save()
    result = json.loads((tmp_path / "out.json").read_text())
    text = decode_figures.report(result)
    if limit > 10:
        assert [row["n"] for row in (cell["tok_s"] for cell in result["figures"]["cells"])] == [3] * 12
        assert {entry["concurrency"] for entry in result["stages"]} == {1, 4, 16}
        assert "not measured" not in text
    else:
        assert "on: no time left" in text
    assert "DDTREE 15" in text


def test_every_prompt_goes_through_all_arms_before_the_next(tmp_path: Path) -> None:
    """At concurrency 1, where rounds hold several prompts; and all arms get the same ones."""
    run = run_of(tmp_path, concurrency="1", rounds=2)
    order: list[tuple[str, int]] = []
    engines = {name: Engine(tmp_path, name, 0) for name in ACCEPTED}
    for name, engine in engines.items():
        engine.ask = lambda request, name=name, ask=engine.ask: (
            order.append((name, request["prompts"][0][0])) if "measure" in request else None,
            ask(request),
        )[1]
    started: Any = SimpleNamespace(engines=engines)
    decode_rounds.rounds(run, started, ARMS, 16, reserve=0)
    assert [prompt for _, prompt in order] == [number for number in range(4) for _ in ARMS]
    auto = [entry for entry in run.result["measurements"] if entry["arm"] == "DDTREE auto"]
    assert [entry["chosen"] for entry in auto] == [{"15": 2}, {"15": 2}]
