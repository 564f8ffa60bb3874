# SPDX-License-Identifier: Apache-2.0
"""What a decode step asks of the host, in engines with CUDA graphs: no wait for the device, and how many launches."""

from __future__ import annotations

from statistics import median
from typing import Any

from gpu_proofs.calls import texts
from gpu_proofs.checks import Part
from gpu_proofs.engines import Arm


def part_steps(part: Part) -> None:
    """One engine in which waiting is an error, and the launches of a tree's step beside those of DFLASH's."""
    calls = texts(part.options)
    counting = {"DFLASH": "dflash", "DDTREE": "ddtree"}
    arms = {
        name: part.engine(f"{file}-counted", calls, variables={"DDTREE_COUNT": f"{file}.count"}, **part.drafting(name))
        for name, file in counting.items()
    }
    if not part.options.cpu:
        guarded = {"DDTREE_GUARD": "ddtree.guard"}
        report_guard(part, part.engine("guarded", calls, variables=guarded, **part.drafting("DDTREE")))
    report_counts(part, {name: part.done(arm) and part.lines(f"{counting[name]}.count") for name, arm in arms.items()})


def report_guard(part: Part, arm: Arm) -> None:
    """A planted wait has to be seen, and no other may have ended the engine."""
    name = "no step waits for the device"
    if not part.done(arm):
        return
    steps = part.lines("ddtree.guard")
    planted = {step["planted"] for step in steps}
    replayed = sum(step["graph"] for step in steps)
    figures = f"{len(steps)} steps, {replayed} with a graph, planted wait: {', '.join(planted)}"
    part.check(name, bool(steps) and planted == {"seen"} and replayed > 0, figures)


def report_counts(part: Part, lines: dict[str, Any]) -> None:
    """A row with the median of each arm, and what a tree's step has that a chain's has not."""
    medians, names = {}, {}
    for name, steps in lines.items():
        if not steps:
            part.check("launches of a step", None, f"{name} was not counted")
            return
        medians[name] = median(step["operations"] for step in steps)
        step = min(steps, key=lambda step: abs(step["operations"] - medians[name]))
        names[name] = step["names"]
    part.facts["launches"] = {"median": medians, "names": names}
    tree, chain = names["DDTREE"], names["DFLASH"]
    apart = {key: tree.get(key, 0) - chain.get(key, 0) for key in {*tree, *chain}}
    text = ", ".join(f"{key} {count:+d}" for key, count in sorted(apart.items()) if count)
    figures = f"DFLASH {medians['DFLASH']:.0f}, DDTREE {medians['DDTREE']:.0f}; {text}"
    part.check("a tree's step launches little more than a chain's", medians["DDTREE"] <= medians["DFLASH"] + 8, figures)
