# SPDX-License-Identifier: Apache-2.0
"""What `decode.py` measures in which order, and what it leaves out when the time is short."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from pathlib import Path
from typing import Any

import decode_figures
from decode_engines import Arm, Started, concurrencies


#: Seconds that the stages of a step are measured for, per arm and concurrency.
STAGE_SECONDS = 0.2
ALWAYS = ("plain", "DFLASH", "DDTREE auto")


class Run:
    """A run of all arms: what it has found, and the time that is left."""

    def __init__(self, options: argparse.Namespace, start: float) -> None:
        self.options, self.end = options, start + options.limit
        self.start = start
        self.prompts = [p[: options.prompt_tokens] for p in json.loads((options.pair / "prompts.json").read_text())]
        self.count = 0
        self.prefill: dict[int, float] = {}
        self.result: dict[str, Any] = {
            "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "definitions": decode_figures.DEFINITIONS,
            "block": 0,
            "arms": [],
            "engines": {},
            "measurements": [],
            "stages": [],
            "dropped": [],
            "phases": {},
        }

    def left(self) -> float:
        """Seconds before the run has to end."""
        return self.end - time.monotonic()

    def phase(self, name: str) -> None:
        """Note how many seconds the run has taken up to here."""
        self.result["phases"][name] = round(time.monotonic() - self.start, 1)
        print(f"[{time.monotonic() - self.start:4.0f} s] {name}", flush=True)
        self.save()

    def save(self) -> None:
        """Write all that is known; all of it or nothing."""
        self.result["figures"] = decode_figures.figures(self.result)
        draft = self.options.out.with_suffix(".draft")
        draft.write_text(json.dumps(self.result, default=str))
        draft.rename(self.options.out)

    def measure(
        self, started: Started, arm: Arm, size: int, number: int, share: float = 1, **changes: Any
    ) -> dict[str, Any] | None:
        """One measurement with the number-th batch of prompts: its window, None when no step held all requests.

        It takes a `share` of the time of a measurement. `changes` go into the engine's request.
        """
        self.count += 1
        # Plain decoding is as fast on one prompt as on another.
        most = self.options.seconds * (0.4 if arm.name == "plain" else 1)
        asked = {
            "measure": f"m{self.count}",
            "prompts": [self.prompts[(number * size + i) % len(self.prompts)] for i in range(size)],
            "tokens": self.options.tokens,
            "seconds": most * share + self.prefill.get(size, 0.0),
            "budget": arm.budget,
        }
        answer = started.engines[arm.engine].ask(asked | changes)
        self.result.setdefault("memory", {})[arm.engine] = answer["memory"]
        found = decode_figures.window(answer["steps"], size, self.options.tokens)
        if found is None:
            errors = "".join(f", {error}" for error in answer["errors"])
            self.drop(f"{arm.name} at concurrency {size}: no whole step{errors}")
        return found

    def drop(self, note: str) -> None:
        """Say once what is missing."""
        if note not in self.result["dropped"]:
            self.result["dropped"].append(note)


def warm_up(run: Run, started: Started, arms: list[Arm]) -> None:
    """Compile what is compiled at first use, and learn how long the prefill of each concurrency takes."""
    sizes = concurrencies(run.options)
    plain = next((arm for arm in arms if arm.name == "plain"), arms[0])
    known = list(run.result["dropped"])
    for size in (sizes[-1], *reversed(sizes)):
        begin = time.monotonic()
        run.measure(started, plain, size, 0, tokens=2, seconds=60)
        run.prefill[size] = time.monotonic() - begin
    run.result["dropped"] = known  # two tokens hold no whole step
    for arm in arms:
        run.measure(started, arm, 1, 0, seconds=30)


def rounds(run: Run, started: Started, arms: list[Arm], block: int, reserve: float) -> None:
    """All rounds, as far as the time goes; `reserve` seconds are left over."""
    options = run.options
    for number in range(options.rounds):
        for size in concurrencies(options):
            if number == 0:
                for arm in (arm for arm in arms if arm.name.startswith("DDTREE auto") and options.settle):
                    settled = time.monotonic() + options.settle
                    while time.monotonic() < settled:
                        run.measure(started, arm, size, 0)
            chosen = [arm for arm in arms if wanted(run, arm, size, number, block)]
            turn = number % len(chosen)
            if not one_block(run, started, chosen[turn:] + chosen[:turn], size=size, number=number, reserve=reserve):
                return
            run.save()
        run.phase(f"round {number + 1}")


def one_block(run: Run, started: Started, arms: list[Arm], *, size: int, number: int, reserve: float) -> bool:
    """All arms at one concurrency, prompt by prompt: False when the time is over, and then nothing of it counts.

    One prompt says little about acceptance: at concurrency 1 several follow each other, and each goes through all arms
    before the next one, so that whatever else the host does meets all of them.
    """
    groups = max(1, run.options.singles // size)
    parts: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in arms}
    chosen: dict[str, int] = {}
    for group in range(groups):
        for arm in arms:
            if run.left() < reserve + 5:
                run.drop(f"from concurrency {size} in round {number + 1} on: no time left")
                return False
            found, steps = observed(run, started, arm, size=size, prompts=number * groups + group, groups=groups)
            parts[arm.name] += [found] if found else []
            for choice, count in steps.items():
                chosen[choice] = chosen.get(choice, 0) + count
    for arm in arms:
        found = decode_figures.together(parts[arm.name], size)
        # A ratio needs the same prompts on both sides.
        if found and len(parts[arm.name]) == groups:
            entry = {"round": number, "concurrency": size, "arm": arm.name, **found}
            run.result["measurements"].append(entry | ({"chosen": chosen} if arm.name == "DDTREE auto" else {}))
    return True


def observed(
    run: Run, started: Started, arm: Arm, *, size: int, prompts: int, groups: int
) -> tuple[dict[str, Any] | None, dict[str, int]]:
    """A measurement of a round; of `auto` also how often it took which choice, where the server counts its steps."""
    share = 1 / groups
    if arm.name != "DDTREE auto":
        return run.measure(started, arm, size, prompts, share), {}
    engine = started.engines[arm.engine]
    before = engine.ask({"info": True}).get("ddtree_steps") or {}
    found = run.measure(started, arm, size, prompts, share)
    after = engine.ask({"info": True}).get("ddtree_steps") or {}
    chosen = {choice: count - before.get(choice, 0) for choice, count in after.items()}
    return found, {choice: count for choice, count in chosen.items() if count}


def wanted(run: Run, arm: Arm, size: int, number: int, block: int) -> bool:
    """Whether an arm is measured: trees need a graph, and from the second round on a chance to be the best."""
    options = run.options
    if not served(run, arm, size, block):
        run.drop(f"{arm.name} at concurrency {size}: no graph of {size * arm.rows(block)} rows")
        return False
    if arm.name in ALWAYS or number == 0:
        return True
    rows = decode_figures.cells([m for m in run.result["measurements"] if m["concurrency"] == size])
    speeds = {row["arm"]: row["to_dflash"]["pooled"] for row in rows if "to_dflash" in row}
    best = max((speed for name, speed in speeds.items() if name.startswith("DDTREE")), default=0.0)
    if arm.name in speeds and speeds[arm.name] < options.hopeless * best:
        run.drop(f"{arm.name} at concurrency {size} after round {number}: below {options.hopeless} of the best tree")
        return False
    return True


def served(run: Run, arm: Arm, size: int, block: int) -> bool:
    """Whether the arm has a graph for so many requests."""
    if arm.engine == "ddtree-more":
        return size <= 8
    return arm.budget in (None, "chain") or size * arm.rows(block) <= run.options.rows


def stages(run: Run, started: Started, arms: list[Arm], block: int) -> None:
    """Time the stages of each speculative arm's steps; a run of its own, so that events disturb no round."""
    staged = [arm for arm in arms if arm.name != "plain" and "uncalibrated" not in arm.name]
    for size in staged_sizes(run.options):
        for arm in staged:
            if not served(run, arm, size, block):
                continue
            if run.left() < 5:
                run.drop(f"stages from {arm.name} at concurrency {size} on: no time left")
                return
            engine = started.engines[arm.engine]
            switch = engine.stages.with_name(engine.stages.name + ".on")
            done = len(read_lines(engine.stages))
            switch.touch()
            known = list(run.result["dropped"])
            run.measure(started, arm, size, 0, seconds=STAGE_SECONDS + run.prefill[size])
            run.result["dropped"] = known  # its figures are nobody's
            switch.unlink()
            steps = [step for step in read_lines(engine.stages)[done:] if step.get("batch") == size]
            run.result["stages"].append({"concurrency": size, "arm": arm.name, "steps": steps[1:]})
    if not any(entry["steps"] for entry in run.result["stages"]):
        run.drop("stages: the engines wrote none")


def staged_sizes(options: argparse.Namespace) -> list[int]:
    """Concurrencies at which stages are timed; each is one of the run's."""
    sizes = concurrencies(options)
    if options.stages is None:
        return sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]})
    return [size for size in sizes if str(size) in options.stages.split(",")]


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The JSON lines of a file that may not be there."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
