# SPDX-License-Identifier: Apache-2.0
"""The part of `gpu_prove` about several verify widths in one engine."""

from __future__ import annotations

import json
import re
from typing import Any

from gpu_proofs.calls import texts
from gpu_proofs.checks import Part
from gpu_proofs.engines import Arm
from gpu_proofs.judging import judge
from gpu_proofs.parts import plain_engine
from gpu_proofs.watching import report_hiding, report_replays


class Wishes:
    """The calls of one wish, of an engine that was asked for all of them, as an arm of their own."""

    def __init__(self, arm: Arm, index: int, count: int) -> None:
        self.arm, self.name = arm, arm.name
        self.calls = slice(index * count, (index + 1) * count)

    @property
    def ended(self) -> str:
        """How the engine ended."""
        return self.arm.ended

    @property
    def log(self) -> Any:
        """The engine's log."""
        return self.arm.log

    def result(self) -> dict[str, Any] | None:
        """What these calls gave."""
        found = self.arm.result()
        return found and {**found, "calls": found["calls"][self.calls]}


def part_lanes(part: Part) -> None:
    """One engine verifies trees of every width, asked for request by request; then `auto` with nothing else given."""
    options = part.options
    block = int(json.loads((options.pair / "draft/config.json").read_text())["block_size"])
    wishes: list[Any] = [0, 4, "chain", options.budget, 40, None]
    widths = {0: 1, 4: 5, "chain": block, options.budget: options.budget + 1, 40: 41, None: options.budget + 1}
    calls = texts(options)
    plain = plain_engine(part, calls)
    tree = part.drafting("DDTREE") | {"speculative_ddtree_budgets": f"0,4,{block - 1},40"}
    asked = [asking(call, wish, index * len(calls)) for index, wish in enumerate(wishes) for call in calls]
    arm = part.engine("lanes", asked, watched=not options.cpu, **tree)
    auto = part.engine("auto", calls, **part.drafting("DDTREE") | {"speculative_ddtree_budget": "auto"})
    arms: dict[str, Any] = {f"lane of {wish}": Wishes(arm, i, len(calls)) for i, wish in enumerate(wishes)}
    judge(part, plain, arms | {"auto": auto})
    if not options.cpu:
        report_widths(part, arm, set(widths.values()))
        for width in sorted({width for width in widths.values() if width > 1}):
            report_replays(part, arm, f"width {width}: ", width=width)
            report_hiding(part, f"width {width}", arm, width=width)
    report_starts(
        part, {"several lanes": arm, "auto": auto, "one lane": part.engine("ddtree", calls, **part.drafting("DDTREE"))}
    )


def asking(call: dict[str, Any], wish: Any, offset: int) -> dict[str, Any]:
    """A call whose requests ask for a budget; a second turn follows the call of the same wish."""
    if "behind" in call:
        call = call | {"behind": call["behind"] + offset}
    if wish is None:
        return call
    return call | {"sampling_params": call["sampling_params"] | {"custom_params": {"ddtree_budget": wish}}}


def report_widths(part: Part, arm: Arm, wanted: set[int]) -> None:
    """Which widths were verified, by replays of their own graphs."""
    steps = part.watched(arm) if arm.result() else []
    replayed = {step["width"]: sum(s["graph"] and s["width"] == step["width"] for s in steps) for step in steps}
    figures = ", ".join(f"{width}: {count} replays" for width, count in sorted(replayed.items())) or arm.ended
    part.check(
        "every width is verified by graphs of its own", set(replayed) == wanted and all(replayed.values()), figures
    )


def report_starts(part: Part, arms: dict[str, Arm]) -> None:
    """How long starts take, and what they say of each lane: facts; and that they compiled the overlay's kernels."""
    for name, arm in arms.items():
        result = arm.result()
        if not result:
            continue
        log = arm.log.read_text(errors="replace")
        captured = re.findall(r"captured the lane of budget .*", log)
        table = re.search(r"what each budget costs.*?(?=\n\[)", log, re.DOTALL)
        part.facts[f"start, {name}"] = {"seconds": result["start_s"], "captured": captured}
        part.machine.say(f"         {part.name}: {name}: started in {result['start_s']:.1f} s")
        if not part.options.cpu:
            report_compiling(part, name, log)
        for line in [*captured, *(table.group(0).splitlines() if table else [])]:
            part.machine.say(f"           {line}")


def report_compiling(part: Part, name: str, log: str) -> None:
    """That a start compiled the overlay's kernels, and serving none of them; of SGLang's own nothing is known.

    Without a start's own line nothing was watched: it was not warmed up, or its log leaves out what is told.
    """
    told = re.findall(r"(\d+) variants of kernels (.*)", log)
    late = re.findall(r"compiling (\w+) while serving", log)
    figures = [*late, *(f"{count} variants {rest}" for count, rest in told)] or ["the log tells of no kernel"]
    part.check(
        f"{name}: no kernel of the overlay is compiled while serving",
        not late and any(int(count) for count, _ in told),
        ", ".join(figures),
    )
