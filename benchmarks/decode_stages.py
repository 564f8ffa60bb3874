# SPDX-License-Identifier: Apache-2.0
"""What a step is made of: runs of their own, so that events disturb no round of `decode.py`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from decode_arms import UNCALIBRATED, Arm, concurrencies, most_rows, numbers
from decode_engines import EngineEndedError, Started
from decode_plan import OVERHEAD
from decode_run import Run


def staged_arms(arms: list[Arm]) -> list[Arm]:
    """Whose steps have stages."""
    return [arm for arm in arms if arm.name != "plain" and not arm.name.endswith(UNCALIBRATED)]


def staged_sizes(options: argparse.Namespace) -> list[int]:
    """Concurrencies at which stages are timed; each is one of the run's."""
    sizes = concurrencies(options)
    if options.stages is None:
        return sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]})
    return [size for size in sizes if size in numbers(options.stages)]


def stages_seconds(run: Run, arms: list[Arm]) -> float:
    """How long all stages take."""
    seconds = run.options.stage_seconds
    once = sum(seconds + 2 * run.plan.prefill[size] + 2 * OVERHEAD for size in staged_sizes(run.options))
    return once * len(staged_arms(arms))


def stages(run: Run, started: Started, arms: list[Arm], block: int) -> None:
    """Time the stages of each speculative arm's steps."""
    for size in staged_sizes(run.options):
        for arm in staged_arms(arms):
            if not arm.served(size, block, most_rows(run.options)) or arm.engine not in started.engines:
                continue
            if run.left() < 8:
                run.drop(f"stages from {arm.name} at concurrency {size} on: no time left")
                return
            try:
                steps = steps_of(run, started, arm, size)
            except EngineEndedError as failure:
                run.lost(started, failure)
                continue
            run.result["stages"].append({"concurrency": size, "arm": arm.name, "steps": steps[1:]})
        run.save()
    if staged_sizes(run.options) and not any(entry["steps"] for entry in run.result["stages"]):
        run.drop("stages: the engines wrote none")


def steps_of(run: Run, started: Started, arm: Arm, size: int) -> list[dict[str, Any]]:
    """The steps of one arm with the milliseconds of their stages."""
    engine = started.engines[arm.engine]
    switch = engine.stages.with_name(engine.stages.name + ".on")
    done, known = len(read_lines(engine.stages)), list(run.result["dropped"])
    switch.touch()
    try:
        run.measure(started, arm, size, 0, seconds=run.options.stage_seconds + run.plan.prefill[size])
    finally:
        switch.unlink()
    run.result["dropped"] = known  # its figures are nobody's
    return [step for step in read_lines(engine.stages)[done:] if step.get("batch") == size]


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The JSON lines of a file that may not be there, and whose last line may still be on its way."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
