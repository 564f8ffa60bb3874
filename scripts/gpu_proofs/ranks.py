# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism on two GPUs: one tree on both ranks, the target's own text, and what a step gathers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpu_proofs.calls import greedy, prompts, texts
from gpu_proofs.checks import Part
from gpu_proofs.engines import SCRIPTS, Arm
from gpu_proofs.judging import judge
from gpu_proofs.parts import plain_engine, report_acceptance


#: Accept lengths of two ranks and of one may differ by so much: another rounding turns a near-tie now and then.
NOISE = 0.03

#: Tokens that are cut off the pair's vocabulary, so that no share of it is a multiple of what SGLang pads to.
CUT = 37


def part_ranks(part: Part) -> None:
    """Every arm on two GPUs, and the same trees on one for their accept length.

    `auto` is fitted as well, and has pages of 16: ranks have to switch widths, and exponents, at the same step.
    """
    options, two = part.options, {"tp_size": 2}
    calls = texts(options)
    plain = plain_engine(part, calls, **two)
    tree = part.drafting("DDTREE")
    arms = {f"DDTREE {options.budget}": part.engine("ddtree", calls, ranked=True, **two, **tree)}
    chooses = {"speculative_ddtree_budget": "auto", "speculative_ddtree_calibration": "auto", "page_size": 16}
    auto = arms["auto"] = part.engine("auto", calls, ranked=True, **two, **tree | chooses)
    one = {f"DDTREE {options.budget}": part.engine("ddtree-one", calls, **tree)}
    if options.cpu:
        part.check("DFLASH on two ranks", None, "SGLang has DFLASH's gather for GPUs only")
    else:
        arms["DFLASH"] = part.engine("dflash", calls, **two, **part.drafting("DFLASH"))
        one["DFLASH"] = part.engine("dflash-one", calls, **part.drafting("DFLASH"))
    fixed = two | {"enable_deterministic_inference": True}
    drawn = part.engine("drawn", drawn_calls(part), ranked=True, **fixed, **tree)
    cut = cut_pair(part)
    padded = plain_engine(part, cut_calls(part), "plain-cut", model_path=str(cut / "target"), **two)
    trees = part.drafting("DDTREE") | {"speculative_draft_model_path": str(cut / "draft")}
    cut_tree = part.engine("ddtree-cut", cut_calls(part), ranked=True, model_path=str(cut / "target"), **two, **trees)

    judge(part, plain, arms)
    judge(part, padded, {f"DDTREE {options.budget}, cut vocabulary": cut_tree}, ", cut vocabulary")
    hashed = {"greedy": arms[f"DDTREE {options.budget}"], "auto": auto, "drawn": drawn, "cut vocabulary": cut_tree}
    for name, arm in hashed.items():
        report_ranks(part, name, arm)
    report_seeds(part, drawn)
    report_acceptance(part, arms)
    report_noise(part, arms, one)
    report_gathered(part)


def drawn_calls(part: Part) -> list[dict[str, Any]]:
    """One batch drawn twice with the same seeds, and once with others."""
    some, tokens = prompts(part.options, 3 if part.options.cpu else 8), 6 if part.options.cpu else 48
    seeds = {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True}
    return [
        {"input_ids": some, "sampling_params": [seeds | {"sampling_seed": seed + i} for i in range(len(some))]}
        for seed in (7, 7, 1000)
    ]


def cut_calls(part: Part) -> list[dict[str, Any]]:
    """A batch of prompts that do without the tokens that were cut off."""
    size = vocabulary(part.options.pair) - CUT
    some = [[token % size for token in prompt] for prompt in prompts(part.options, 3 if part.options.cpu else 8)]
    return [greedy(some, 6 if part.options.cpu else 64)]


def vocabulary(pair: Path) -> int:
    """The target's vocabulary."""
    return int(json.loads((pair / "target/config.json").read_text())["vocab_size"])


def cut_pair(part: Part) -> Path:
    """The pair without the last `CUT` tokens of its vocabulary, written by `gpu_proofs/cut_pair.py`."""
    folder, log = part.machine.workdir / "cut_pair", part.machine.workdir / "cut_pair.log"
    script = str(SCRIPTS / "gpu_proofs/cut_pair.py")
    code = part.command([part.options.python, script, str(part.options.pair), str(folder), str(CUT)], log)
    if code != 0:
        raise RuntimeError(f"{script} ended with {code}: {log.read_text(errors='replace')[-600:]}")
    return folder


def report_ranks(part: Part, name: str, arm: Arm) -> None:
    """Whether both ranks built the same trees and accepted the same paths, step by step."""
    result = part.done(arm)
    steps = part.ranked(arm) if result else []
    title = f"{name}: trees and acceptances are the same on both ranks"
    if not steps:
        part.check(title, False if result else None, "no step was hashed" if result else arm.ended)
        return
    apart = [step for step in steps if step["apart"]]
    trees, ranks = sum(step["what"] == "build_tree" for step in steps), {step["ranks"] for step in steps}
    contents = len({step["hash"] for step in steps})
    figures = (
        f"{trees} trees and {len(steps) - trees} acceptances, {contents} different contents, ranks {sorted(ranks)}, "
        f"{sum(step['fields'] for step in steps)} tensors: {len(apart)} apart"
    )
    if apart:
        figures += f", first in {apart[0]['what']}: {', '.join(apart[0]['apart'])}"
    part.check(title, not apart and ranks == {2} and contents > len(steps) // 3, figures)


def report_seeds(part: Part, arm: Arm) -> None:
    """The same seeds give the same text, others another."""
    result = arm.result()
    if result:
        first, again, other = (call["output_ids"] for call in result["calls"])
        differ = sum(a != b for a, b in zip(first, other, strict=True))
        part.check(
            "one seed draws one text",
            first == again and differ > 0,
            f"{sum(a == b for a, b in zip(first, again, strict=True))} of {len(first)} texts equal with the same "
            f"seeds, {differ} differ with others",
        )


def report_noise(part: Part, two: dict[str, Arm], one: dict[str, Arm]) -> None:
    """Accept lengths of two ranks beside those of one."""
    for name, arm in one.items():
        pair = [tokens_per_step(result) for result in (part.done(arm), two[name].result()) if result]
        if len(pair) == 2:
            apart = abs(pair[1] / pair[0] - 1)
            figures = f"{pair[0]:.3f} on one, {pair[1]:.3f} on two: {apart:.1%} apart (bound {NOISE:.0%})"
            part.check(f"{name}: two GPUs accept what one accepts", apart <= NOISE, figures)
            part.facts[f"{name}: tokens per step on one and two"] = pair


def tokens_per_step(result: dict[str, Any]) -> float:
    """Tokens for every verify step of all calls."""
    steps = sum(spec.get("spec_verify_ct", 0) for call in result["calls"] for spec in call["spec"])
    return sum(len(ids) for call in result["calls"] for ids in call["output_ids"]) / max(1, steps)


def report_gathered(part: Part) -> None:
    """What a step gathers, and how long that takes, beside gathering all logits: `gpu_proofs/head_ranks.py`."""
    out, log = part.machine.workdir / "head_ranks.json", part.machine.workdir / "head_ranks.log"
    code = part.command([part.options.python, str(SCRIPTS / "gpu_proofs/head_ranks.py"), str(out)], log)
    if code != 0:
        ended = None if code is None else False
        part.check("the head over shards", ended, f"exit {code}: {log.read_text(errors='replace')[-600:]}")
        return
    for row in json.loads(out.read_text()):
        part.facts.setdefault("gathered", []).append(row)
        figures = (
            f"{row['rows']} rows, k {row['k']}: {row['bytes'] / 1e3:.1f} kB a rank in {row['gathers']} gathers, "
            f"{row['us']:.0f} us; all logits {row['all bytes'] / 1e6:.1f} MB, {row['all us']:.0f} us; whole head "
            f"{row['head us']:.0f} us"
        )
        part.check(f"head over shards, vocabulary {row['vocabulary']} + {row['added']}", row["equal"], figures)
