# SPDX-License-Identifier: Apache-2.0
"""The order of the decoding benchmark, on engines that take a known time for a step: it ends with a whole report."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest


sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import decode
import decode_contenders
import decode_report
import decode_rounds
import decode_run
import decode_stages
from decode_arms import Arm
from decode_engines import EngineEndedError


ARMS = [Arm("plain", "plain"), Arm("DFLASH", "dflash"), Arm("DDTREE auto", "ddtree"), Arm("DDTREE 15", "ddtree", 15)]
ACCEPTED = {"plain": 1, "dflash": 3, "ddtree": 4}


class Clock:
    """In the place of `time` in the benchmark's modules: whoever sleeps takes no time, and no one else does."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    for module in (decode, decode_rounds, decode_run):
        monkeypatch.setattr(module, "time", found)
    return found


class Engine:
    """Answers like an engine that decodes steps of 10 ms, and takes `cost` seconds of the benchmark's clock for it."""

    def __init__(self, folder: Path, name: str, cost: float) -> None:
        self.name, self.cost, self.stages = name, cost, folder / f"{name}.stages"
        self.asked: list[dict[str, Any]] = []
        self.informed = 0
        self.lives = 10_000

    def ask(self, request: dict[str, Any], _seconds: float) -> dict[str, Any]:
        if "info" in request:
            self.informed += 1
            return {"ddtree_steps": {"15": len(self.asked)}}
        self.lives -= 1
        if self.lives < 0:
            raise EngineEndedError(self.name, f"engine {self.name} gave no answer in time\nits log")
        self.asked.append(request)
        decode_rounds.time.sleep(self.cost)
        if self.stages.with_name(self.stages.name + ".on").exists():
            line = json.dumps({"batch": len(request["prompts"]), "width": 16, "ms": {"verify": 6.0}})
            with self.stages.open("a") as out:
                out.write(f"{line}\n" * 3)
        gain = ACCEPTED[self.name]
        steps = [[0.01 * at, "d", [1 + gain * at] * len(request["prompts"]), 0] for at in range(60)]
        return {"steps": steps, "memory": {}, "errors": []}


class Started:
    """Engines of a run."""

    def __init__(self, folder: Path, cost: float = 0.0) -> None:
        self.engines = {name: Engine(folder, name, cost) for name in ACCEPTED}

    def give_up(self, failure: EngineEndedError) -> None:
        self.engines.pop(failure.engine, None)


def run_of(tmp_path: Path, **changes: Any) -> decode_run.Run:
    (tmp_path / "prompts.json").write_text(json.dumps([[number] * 8 for number in range(64)]))
    options = {"pair": tmp_path, "out": tmp_path / "out.json", "prompt_tokens": 8, "tokens": 12, "seconds": 1.0}
    options |= {
        "concurrency": "1,4,16",
        "rounds": 3,
        "singles": 2,
        "settle": 0,
        "rows": 2080,
        "contenders": 0,
        "budgets": "",
    }
    options |= {"stages": None, "stage_seconds": 0.25, "limit": 300, "without_calibration": False}
    run = decode_run.Run(argparse.Namespace(**options | changes), decode_rounds.time.monotonic())
    run.result |= {"block": 16, "arms": [vars(arm) for arm in ARMS]}
    return run


def measured(run: decode_run.Run, started: Any) -> dict[str, Any]:
    """The whole of what is done with engines, as it was written."""
    decode_rounds.warm_up(run, started, ARMS)
    decode_rounds.settle(run, started, ARMS)
    decode_rounds.rounds(run, started, ARMS, 16)
    decode_contenders.contend(run, started, ARMS, 16)
    run.save()
    result: dict[str, Any] = json.loads((run.options.out).read_text())
    return result


def counts(result: dict[str, Any]) -> dict[tuple[str, int], int]:
    """Rounds of each arm at each concurrency."""
    return {(row["arm"], row["concurrency"]): row["tok_s"]["n"] for row in result["figures"]["cells"]}


def test_a_run_with_enough_time_holds_every_arm_in_every_round(tmp_path: Path) -> None:
    """At other concurrencies than the default ones, with the stages."""
    run = run_of(tmp_path)
    result = measured(run, Started(tmp_path))
    assert set(counts(result).values()) == {3}
    assert len(counts(result)) == 12
    assert {entry["concurrency"] for entry in result["stages"]} == {1, 4, 16}
    assert all(entry["steps"] for entry in result["stages"])
    text = decode_report.report(result)
    assert "not measured" not in text
    assert "fewer than" not in text
    assert decode.status(run, "") == 0


def test_time_that_is_left_goes_to_what_may_be_the_best(tmp_path: Path) -> None:
    """Plain decoding is far behind; the rounds of all arms and the exit status count as before."""
    run = run_of(tmp_path, contenders=2)
    result = measured(run, Started(tmp_path))
    of = {arm: {counts(result)[arm, size] for size in (1, 4, 16)} for arm in ("plain", "DFLASH", "DDTREE 15")}
    assert of == {"plain": {3}, "DFLASH": {3}, "DDTREE 15": {5}}
    notes = [note["contenders"] for note in result["plan"][3:]]
    assert sorted(notes, key=str) == [{size: ["DDTREE auto", "DDTREE 15"]} for size in ("1", "16", "4") for _ in "12"]
    assert "contender rounds: 2 at 1, 2 at 4, 2 at 16; of 2 each" in result["phases"]
    lines = decode_report.report(result).splitlines()
    table = lines[lines.index(next(line for line in lines if line.startswith("rounds of all + of contenders"))) :]
    assert [line.split()[-3:] for line in table[2:4]] == [["3", "3", "3"], ["3+2", "3+2", "3+2"]]
    assert lines[-1].startswith("ok      every arm has all rounds: 12 of 12 cells have all 3")
    assert decode.status(run, "") == 0


@pytest.mark.parametrize("limit", range(35, 50, 3))
def test_contender_rounds_end_with_the_time(tmp_path: Path, limit: int) -> None:
    """Of a block that is cut nothing counts, and nothing is missing: nobody was promised any."""
    run = run_of(tmp_path, concurrency="4", contenders=10, limit=limit)
    result = measured(run, Started(tmp_path, 1.0))
    rounds: dict[int, set[str]] = {}
    for entry in result["measurements"]:
        rounds.setdefault(entry["round"], set()).add(entry["arm"])
    assert [len(rounds[number]) for number in sorted(rounds)] == [4, 4, 4] + [2] * (len(rounds) - 3)
    assert sum("contenders" in note for note in result["plan"]) == len(rounds) - 3 < 10
    assert run.left() >= decode_rounds.CLOSING
    text = decode_report.report(result)
    assert "fewer than" not in text
    assert "no time left" not in text
    assert decode.status(run, "") == 0


def test_contender_rounds_are_not_rounds_of_all_arms(tmp_path: Path) -> None:
    """A main arm that lacks one of those is short, however often it was measured behind them."""
    run = run_of(tmp_path, contenders=3)
    result = measured(run, Started(tmp_path))
    run.result["measurements"] = [m for m in result["measurements"] if (m["arm"], m["round"]) != ("DFLASH", 1)]
    run.save()
    assert decode.status(run, "") == 3
    assert "fewer than 3 rounds: DFLASH: c=1 2, c=4 2, c=16 2" in decode_report.report(run.result)


def test_contenders_go_on_without_an_engine_that_is_lost(tmp_path: Path) -> None:
    """Without DFLASH the trees go on; without any `auto` nothing is held against the best."""
    for name, lives, several in (("dflash", 4, ["DDTREE auto", "DDTREE 15"]), ("ddtree", 9, None)):
        run, started = run_of(tmp_path, contenders=1, concurrency="4"), Started(tmp_path)
        started.engines[name].lives = lives
        result = measured(run, started)
        found = [note["contenders"]["4"] for note in result["plan"] if "contenders" in note]
        assert found == ([several] if several else [])


def test_a_run_with_little_time_keeps_the_main_arms_and_says_what_is_missing(tmp_path: Path) -> None:
    """Time for three rounds of plain, DFLASH and auto, and not of the fixed tree too."""
    run = run_of(tmp_path, concurrency="4", limit=13.5)
    result = measured(run, Started(tmp_path, 0.3))
    found = counts(result)
    assert {found[name, 4] for name in ("plain", "DFLASH", "DDTREE auto")} == {3}
    assert found.get(("DDTREE 15", 4), 0) < 3
    assert sum(len(note["left_out"]) for note in result["plan"]) > 0
    assert decode.status(run, "") == 0


def test_a_run_that_is_over_too_early_says_so(tmp_path: Path) -> None:
    """Its exit status is of its own, and what it has measured is in the table."""
    run = run_of(tmp_path, limit=9.5)
    result = measured(run, Started(tmp_path, 0.05))
    text = decode_report.report(result)
    assert "on: no time left" in text
    assert decode.status(run, "") == 3


@pytest.mark.parametrize("lives", [0, 7, 15])
@pytest.mark.parametrize("name", ACCEPTED)
def test_an_engine_that_hangs_costs_no_other_arm(tmp_path: Path, name: str, lives: int) -> None:
    """Lost in the warm-up, or in the middle of a round: the table of the others, and an exit status."""
    run, started = run_of(tmp_path), Started(tmp_path)
    started.engines[name].lives = lives
    result = measured(run, started)
    found = counts(result)
    for arm in ARMS:
        assert (arm.engine == name) or {found[arm.name, size] for size in (1, 4, 16)} == {3}
    text = decode_report.report(result)
    assert f"FAILED: engine {name} gave no answer in time" in text.splitlines()
    assert decode.status(run, "") == 1


def test_every_block_is_on_disk_when_the_next_begins(tmp_path: Path) -> None:
    """A run that is killed keeps what it has measured."""
    run, started = run_of(tmp_path, concurrency="1,4", rounds=2), Started(tmp_path)
    seen, ask = [], started.engines["plain"].ask

    def asked(request: dict[str, Any], seconds: float) -> dict[str, Any]:
        seen.append(len(json.loads(run.options.out.read_text())["measurements"]) if run.options.out.exists() else 0)
        return ask(request, seconds)

    started.engines["plain"].ask = asked  # type: ignore[method-assign]
    measured(run, started)
    assert {0, 4, 8, 12} <= set(seen)


def test_figures_that_break_do_not_cost_the_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured is written, and the report says why it has no table."""
    monkeypatch.setattr("decode_figures.stage_means", lambda _: 1 / 0)
    result = measured(run_of(tmp_path), Started(tmp_path))
    assert len(result["measurements"]) == 36
    assert "not measured: figures: ZeroDivisionError" in decode_report.report(result)


def test_runs_that_share_a_gpu_measure_in_turns(tmp_path: Path) -> None:
    """The second waits for the first, and no longer than it has time; its time for measuring begins with its turn."""
    shared = {"turn": tmp_path / "turn", "measuring": 50.0}
    first, second = run_of(tmp_path, **shared), run_of(tmp_path, **shared, limit=11.0)
    with decode.turn(first):
        assert 40 < first.left() <= 50
        with pytest.raises(TimeoutError, match="another run"), decode.turn(second):
            pass
    with decode.turn(run_of(tmp_path, **shared)):
        pass


def test_a_line_of_stages_that_is_still_being_written_is_left(tmp_path: Path) -> None:
    """An engine writes while the benchmark reads."""
    file = tmp_path / "stages"
    assert decode_stages.read_lines(file) == []
    file.write_text('{"batch": 1}\n{"bat')
    assert decode_stages.read_lines(file) == [{"batch": 1}]


def test_every_prompt_goes_through_all_arms_before_the_next(tmp_path: Path) -> None:
    """At concurrency 1, where rounds hold several prompts: there and back; and all arms get the same ones."""
    run, started = run_of(tmp_path, concurrency="1", rounds=2, stages=""), Started(tmp_path)
    order: list[tuple[str, int]] = []
    for name, engine in started.engines.items():
        engine.ask = lambda request, seconds, name=name, ask=engine.ask: (  # type: ignore[method-assign]
            order.append((name, request["prompts"][0][0])) if "measure" in request else None,
            ask(request, seconds),
        )[1]
    result: Any = started
    decode_rounds.rounds(run, result, ARMS, 16)
    assert [prompt for _, prompt in order] == [number for number in range(4) for _ in ARMS]
    names = [[name for name, prompt in order if prompt == number] for number in range(4)]
    assert names[0] == names[1][::-1] == names[2][::-1] == names[3]
    auto = [entry for entry in run.result["measurements"] if entry["arm"] == "DDTREE auto"]
    assert [entry["chosen"] for entry in auto] == [{"15": 2}, {"15": 2}]


def test_a_measurement_without_a_whole_step_is_made_again_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stall is not the arm's fault, and leaves no note; an arm that never has one is left out, with what was seen."""
    run, started = run_of(tmp_path), Started(tmp_path)
    ask, whole = started.engines["ddtree"].ask, iter([False, True, False, False])

    def stalled(request: dict[str, Any], seconds: float) -> dict[str, Any]:
        answer = ask(request, seconds)
        return answer | {"steps": []} if "measure" in request and not next(whole) else answer

    monkeypatch.setattr(started.engines["ddtree"], "ask", stalled)
    arm = Arm("DDTREE auto", "ddtree")
    found, _ = decode_rounds.observed(run, started, arm, size=4, prompts=0, groups=1)
    assert found and run.result["dropped"] == []
    found, _ = decode_rounds.observed(run, started, arm, size=4, prompts=0, groups=1)
    assert found is None
    assert "no whole step among 0 steps of 0 requests at most in" in run.result["dropped"][0]


def test_a_measurement_is_not_made_again_when_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was left for saving and for closing the engines stays."""
    run, started = run_of(tmp_path, limit=8), Started(tmp_path, cost=3.0)
    engine = started.engines["plain"]
    monkeypatch.setattr(engine, "ask", lambda *given, ask=engine.ask: ask(*given) | {"steps": []})
    found, _ = decode_rounds.observed(run, started, ARMS[0], size=4, prompts=0, groups=1)
    assert found is None and len(engine.asked) == 1


def test_steps_of_another_budget_are_no_measurement(tmp_path: Path) -> None:
    """An engine without a graph of what was asked for takes its configured budget, here 15, and says nothing."""
    run, started = run_of(tmp_path), Started(tmp_path)
    for arm, is_found in ((Arm("DDTREE 15", "ddtree", 15), True), (Arm("DDTREE 64", "ddtree", 64), False)):
        found, _ = decode_rounds.observed(run, started, arm, size=4, prompts=0, groups=1)
        assert bool(found) == is_found
    assert run.result["dropped"] == ["DDTREE 64 at concurrency 4: its engine has no graph of it, and took 15"]


def test_every_server_is_asked_alike(tmp_path: Path) -> None:
    """What being asked costs a server is in no arm's figures alone."""
    run, started = run_of(tmp_path), Started(tmp_path)
    for number in (1, 2):
        for arm in ARMS:
            engine = started.engines[arm.engine]
            before = engine.informed
            decode_rounds.observed(run, started, arm, size=4, prompts=0, groups=1)
            assert engine.informed == before + 2, (arm.name, number)


def test_what_settling_lacks_is_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its figures are nobody's, and each note would have numbers of its own."""
    run, started = run_of(tmp_path), Started(tmp_path)
    engine = started.engines["ddtree"]
    monkeypatch.setattr(engine, "ask", lambda *given, ask=engine.ask: ask(*given) | {"steps": []})
    assert decode_rounds.attempted(run, started, ARMS[2], 4)
    assert run.result["dropped"] == []
