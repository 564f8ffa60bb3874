# SPDX-License-Identifier: Apache-2.0
"""Is a difference to plain decoding explained by the target's own rounding?

Two computations of the same logits part at a place only if one of them shifts the gap between the two tokens there by
at least that gap. How far rounding shifts gaps is measured: plain decoding, one token a step at all batch sizes,
beside a clean prefill of its own text. A first difference is explained when its gap in a clean prefill is at most
`ALLOWANCE` times the shift that one position in a hundred exceeds; an arm whose logits are wrong parts at any gap.

The largest shift of all would be no measure where the tail is long: with KV of 8 bits a clean prefill reads the keys of
its own text unrounded, and one gap in a thousand then shifts by nearly as much as most gaps are wide.
"""

from __future__ import annotations

import statistics
from typing import Any

from gpu_proofs.calls import greedy
from gpu_proofs.checks import Part
from gpu_proofs.engines import Arm


#: An arm computes a step in another shape than plain decoding: its logits may shift twice as far.
ALLOWANCE = 2


def differences(plain: dict[str, Any], other: dict[str, Any]) -> tuple[list[tuple[list[int], int, int]], int]:
    """First difference of each output (the shared text, plain's token there, the other's), and how many were compared.

    A second turn follows what the first gave; where that differs, the two have nothing to compare.
    """
    found, compared = [], 0
    for mine, theirs in zip(plain["calls"], other["calls"], strict=True):
        rows = zip(*(call[key] for call in (mine, theirs) for key in ("input_ids", "output_ids")), strict=True)
        for given, wanted, given_there, got in rows:
            at = next((i for i, (a, b) in enumerate(zip(wanted, got, strict=False)) if a != b), None)
            compared += given == given_there
            if given == given_there and at is not None:
                found.append((given + wanted[:at], wanted[at], got[at]))
    return found, compared


def at_other_sizes(plain: dict[str, Any]) -> dict[str, Any]:
    """Plain decoding as an arm beside itself: what its largest batch wrote for the inputs of its smaller ones."""
    largest = max(plain["calls"], key=lambda call: len(call["input_ids"]))
    wrote = {str(given): got for given, got in zip(largest["input_ids"], largest["output_ids"], strict=True)}
    calls = []
    for call in plain["calls"]:
        known = [call is not largest and str(given) in wrote for given in call["input_ids"]]
        rows = list(zip(known, call["input_ids"], call["output_ids"], strict=True))
        inputs = [given if known else None for known, given, _ in rows]
        calls.append({"input_ids": inputs, "output_ids": [wrote.get(str(given), got) for _, given, got in rows]})
    return {"calls": calls}


def noise(plain: Arm) -> dict[str, float] | None:
    """How far plain decoding shifts the gap between its two first tokens from that of a clean prefill.

    `plain` has reported its two best tokens at each position ("tops": 2). None when it does not answer.
    """
    with plain.asking:
        if "noise" not in plain.kept:
            plain.kept["noise"] = measured_noise(plain)
        return plain.kept["noise"]


def measured_noise(plain: Arm) -> dict[str, float] | None:
    """One clean prefill of every text that plain decoding wrote."""
    result = plain.result()
    calls = result["calls"] if result else []
    again = [
        greedy([given + got[:-1] for given, got in zip(call["input_ids"], call["output_ids"], strict=True)], 1)
        | {
            "logprobs": [sorted({token for top in row for _, token in top}) for row in call["tops"]],
            "from": [len(given) - 1 for given in call["input_ids"]],
        }
        for call in calls
    ]
    clean = plain.more(again)
    if not clean:
        return None
    shifts, gaps = [], []
    for call, asked, answered in zip(calls, again, clean, strict=True):
        for row, tokens, found in zip(call["tops"], asked["logprobs"], answered["logprobs"], strict=True):
            for ((first, a), (second, b)), values in zip(row, found, strict=True):
                value = dict(zip(tokens, values, strict=True))
                shifts.append(abs((first - second) - (value[a] - value[b])))
                gaps.append(first - second)
    bound = ALLOWANCE * sorted(shifts)[int(0.99 * len(shifts))]
    return {
        "bound": bound,
        "mean": statistics.fmean(shifts),
        "largest": max(shifts),
        "gap": statistics.median(gaps),
        "within": statistics.fmean(gap <= bound for gap in gaps),
        "n": len(gaps),
    }


def judge(part: Part, plain: Arm, arms: dict[str, Arm], kind: str = "") -> None:
    """A row for every arm: the target's own gap at each first difference, by clean prefills of the plain engine."""
    base = part.done(plain)
    results = {name: result for name, arm in arms.items() if (result := part.done(arm))}
    if not base:
        return
    measured = noise(plain)
    if not measured:
        part.check(f"rounding of plain decoding{kind}", None, "its engine did not answer")
        return
    bound = measured["bound"]
    figures = (
        f"gaps shift by {measured['mean']:.4f} in the mean, by more than {bound / ALLOWANCE:.4f} at one of a hundred "
        f"positions, {measured['largest']:.4f} at most, over {measured['n']}; {measured['within']:.0%} of all gaps are "
        f"within the bound of {bound:.4f}, half are wider than {measured['gap']:.2f}"
    )
    part.check(f"rounding of plain decoding{kind} explains few gaps", bound < measured["gap"], figures)
    if len(base["calls"]) > 1:  # one batch alone has no other size to be compared with
        results["plain at other batch sizes" + kind] = at_other_sizes(base)
    compared = {name: differences(base, result) for name, result in results.items()}
    places = [(name, *place) for name, (found, _) in compared.items() for place in found]
    answers = plain.more([greedy([text], 1) | {"logprobs": [[wanted, got]]} for _, text, wanted, got in places])
    gaps: dict[str, list[float]] = {name: [] for name in results}
    for (name, *_), call in zip(places, answers or [], strict=False):
        first, second = call["logprobs"][0][-1]
        gaps[name].append(abs(first - second))
    for name, found in gaps.items():
        count = compared[name][1]
        largest = f", largest gap {max(found):.4f}" if found else ""
        passed = max(found, default=0.0) <= bound if answers is not None else None
        part.check(
            f"{name} against plain", passed, f"{len(found)} of {count} outputs part{largest} (bound {bound:.4f})"
        )
    part.facts["noise" + kind] = measured
    part.facts["gaps"] = part.facts.get("gaps", {}) | gaps
