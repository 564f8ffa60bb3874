# SPDX-License-Identifier: Apache-2.0
"""What a watched engine (`scripts/gpu_watch`) has seen, as checks of a part of `gpu_prove`."""

from __future__ import annotations

from typing import Any

from gpu_proofs.checks import Part
from gpu_proofs.engines import Arm


def report_replays(part: Part, arm: Arm | None, name: str = "", kind: str = "", width: int | None = None) -> None:
    """Of a watched engine: its replayed steps beside the same steps without a graph.

    `name` goes in front of the rows; `kind` is that of `judge`, by which the rounding was measured; with `width` only
    its steps count.

    A replay runs the same kernels on the same inputs; where it turns another token first, the two have to be a rounding
    apart for both runs.
    """
    steps = of_width(part.watched(arm), width) if arm and arm.result() else []
    replayed = [step for step in steps if step["graph"]]
    part.facts["steps" + name] = steps
    if not steps:
        failed = arm and arm.ended != "no time left"
        part.check(f"{name}replay equals eager on the same inputs", False if failed else None, "no graph was replayed")
        return
    gap = max((gap for step in steps for gap in step["gaps"]), default=0.0)
    lengths = {length for step in steps for length in step["lengths"]}
    figures = (
        f"{len(replayed)} of {len(steps)} steps replayed, batches {sorted({s['batch'] for s in steps})}, "
        f"{len(lengths)} lengths; logits apart at most {max(s['logits'] for s in steps):.4f}, hidden "
        f"{max(s['hidden'] for s in steps):.4f}; {sum(len(s['gaps']) for s in steps)} argmaxes differ by {gap:.4f}"
    )
    bound = part.facts.get("noise" + kind, {}).get("bound", 0.0)
    part.check(f"{name}replay equals eager on the same inputs", bool(replayed) and gap <= bound, figures)
    rows = sum(step["rows"] for step in steps)
    part.check(f"{name}every row is finite, padding included", all(s["finite"] for s in steps), f"{rows} rows")


def of_width(steps: list[dict[str, Any]], width: int | None) -> list[dict[str, Any]]:
    """The steps that verified so many nodes a request; None: all."""
    return [step for step in steps if width in (None, step["width"])]


def report_hiding(part: Part, name: str, arm: Arm, width: int | None = None) -> None:
    """Of a watched engine: nodes whose token was changed, and who noticed."""
    steps = of_width(part.watched(arm), width) if arm.result() else []
    if not steps:
        failed = arm.ended != "no time left"
        part.check(f"{name}: nodes see their ancestors and nobody else", False if failed else None, arm.ended)
        return
    total = {key: sum(step[key] for step in steps) for key in ("hidden rows", "leaks", "seeing rows", "blind")}
    figures = (
        f"{len(steps)} steps, {sum(len(step['changed nodes']) for step in steps)} nodes changed "
        f"({sum(step['changed padding'] for step in steps)} of them padding): {total['leaks']} of "
        f"{total['hidden rows']} rows that do not see them gave other numbers (by "
        f"{max(step['leak'] for step in steps):.4f}), {total['blind']} of {total['seeing rows']} that see them did not"
    )
    passed = not total["leaks"] and not total["blind"] and bool(total["hidden rows"] and total["seeing rows"])
    passed &= "padding" not in name or any(step["changed padding"] for step in steps)
    part.check(f"{name}: nodes see their ancestors and nobody else", passed, figures)
    part.facts[f"hiding, {name}"] = total
