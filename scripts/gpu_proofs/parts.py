# SPDX-License-Identifier: Apache-2.0
"""The parts of `gpu_prove` that compare outputs, and the one that looks for lost slots."""

from __future__ import annotations

import random
from typing import Any

from gpu_proofs.calls import greedy, prompts, texts
from gpu_proofs.checks import Part
from gpu_proofs.engines import SCRIPTS, Arm
from gpu_proofs.judging import differences, judge
from gpu_proofs.watching import report_hiding, report_replays


def plain_engine(part: Part, calls: list[dict[str, Any]], name: str = "plain", **extra: Any) -> Arm:
    """Plain decoding that reports its two best tokens and stays for clean prefills."""
    asked = [call | {"tops": 2} for call in calls]
    return part.engine(name, asked, stays=True, disable_radix_cache=True, **extra)


def part_graphs(part: Part, **extra: Any) -> None:
    """Replays equal eager forwards; graphs on and off give the same output; everything judged by the logit gap."""
    calls, options = texts(part.options), part.options
    plain = plain_engine(part, calls)
    tree = part.drafting("DDTREE") | extra
    arms = {
        "DFLASH": part.engine("dflash", calls, **part.drafting("DFLASH"), **extra),
        f"DDTREE {options.budget}": part.engine("ddtree", calls, **tree),
        f"DDTREE {options.budget} eager": part.engine("eager", calls, disable_cuda_graph=True, **tree),
    }
    if not options.cpu:  # a CPU replays nothing
        eager = {"disable_cuda_graph": True}
        arms["plain eager"] = part.engine("plain-eager", calls, disable_radix_cache=True, **eager)
        arms["DFLASH eager"] = part.engine("dflash-eager", calls, **eager, **part.drafting("DFLASH"), **extra)
        arms[f"DDTREE {options.budget} watched"] = part.engine("watched", calls, watched=True, **tree)
    for budget in (int(text) for text in options.budgets.split(",") if text):
        if budget != options.budget:
            trees = part.drafting("DDTREE", budget) | extra
            arms[f"DDTREE {budget}"] = part.engine(f"ddtree-{budget}", calls, **trees)
    judge(part, plain, arms)
    watched = f"DDTREE {options.budget} watched"
    report_replays(part, arms.get(watched))
    if watched in arms:
        report_hiding(part, watched, arms[watched])
    report_acceptance(part, arms)
    report_equals(part, arms)


def report_equals(part: Part, arms: dict[str, Arm]) -> None:
    """How many outputs of each speculative arm are DFLASH's to the token; a fact, not a check."""
    written = {name: result for name, arm in arms.items() if (result := arm.result())}
    chain = written.pop("DFLASH", None)
    for name, result in written.items() if chain else ():
        found, compared = differences(chain, result)
        part.facts[f"{name}: equal to DFLASH"] = [compared - len(found), compared]
        part.machine.say(f"         {part.name}: {name}: {compared - len(found)} of {compared} outputs equal DFLASH's")


def report_acceptance(part: Part, arms: dict[str, Arm]) -> None:
    """Tokens per step of each arm; what a tree is for."""
    lengths = {}
    for name, arm in arms.items():
        calls = (arm.result() or {"calls": []})["calls"]
        steps = sum(spec.get("spec_verify_ct", 0) for call in calls for spec in call["spec"])
        if steps:
            lengths[name] = sum(len(ids) for call in calls for ids in call["output_ids"]) / steps
    part.facts["tokens per step"] = lengths
    names = ("DFLASH", f"DDTREE {part.options.budget}")
    chain, tree = (lengths.get(name) for name in names)
    passed = tree > chain if tree and chain else None
    part.check("a tree accepts more than the chain", passed, ", ".join(f"{k} {v:.2f}" for k, v in lengths.items()))


def part_hybrid(part: Part) -> None:
    """The same for recurrent layers, on the pair of `scripts/hybrid_pair`.

    SGLang 0.5.11 has no prefix cache for them with speculation. Plain decoding and trees in float16 as well: with an
    eighth of the rounding, far fewer outputs may part. DFLASH feeds its drafter bfloat16 and has no such arm.
    """
    part.options.pair = part.options.hybrid_pair or part.machine.workdir / "hybrid_pair"
    part.options.budgets = ""
    if not part.options.hybrid_pair:
        log = part.machine.workdir / "hybrid_pair.log"
        code = part.command([part.options.python, str(SCRIPTS / "hybrid_pair"), str(part.options.pair)], log)
        if code != 0:
            part.check("the pair can be written", False, f"exit {code}: {log.read_text(errors='replace')[-1000:]}")
            return
    extra = {"disable_radix_cache": True, "speculative_ddtree_allow_hybrid_unsafe": True}
    calls, finer = texts(part.options), {} if part.options.cpu else {"dtype": "float16"}
    plain = plain_engine(part, calls, "plain-float16", **finer)
    tree = part.drafting("DDTREE") | extra
    arms = {"DDTREE float16": part.engine("ddtree-float16", calls, **tree, **finer)}
    part_graphs(part, **extra)
    judge(part, plain, arms, ", float16")


def part_pages(part: Part) -> None:
    """Six combinations of page size and KV type; each KV type has its own plain and DFLASH."""
    calls = texts(part.options)
    kinds: dict[str, tuple[Arm, dict[str, Arm]]] = {}
    for kind in ("bfloat16", "fp8_e5m2"):
        stored = {} if kind == "bfloat16" else {"kv_cache_dtype": kind}
        plain = plain_engine(part, calls, f"plain-{kind}", **stored)
        arms = {f"DFLASH {kind}": part.engine(f"dflash-{kind}", calls, **stored, **part.drafting("DFLASH"))}
        for page in (1, 16, 64):
            paged = stored if page == 1 else stored | {"page_size": page}
            arms[f"DDTREE {kind}, pages of {page}"] = part.engine(
                f"ddtree-{kind}-{page}", calls, **paged, **part.drafting("DDTREE")
            )
        kinds[kind] = plain, arms
    for kind, (plain, arms) in kinds.items():
        judge(part, plain, arms, "" if kind == "bfloat16" else f", {kind}")
        report_pages(part, arms)


def report_pages(part: Part, arms: dict[str, Arm]) -> None:
    """How many outputs of trees with each page size are those of the first one that was run; facts, not checks."""
    results = {name: result for name, arm in arms.items() if name.startswith("DDTREE") and (result := arm.result())}
    names = list(results)
    for name in names[1:]:
        pairs = [
            a == b
            for mine, other in zip(results[names[0]]["calls"], results[name]["calls"], strict=True)
            for a, b in zip(mine["output_ids"], other["output_ids"], strict=True)
        ]
        part.facts[f"{name}: equal to {names[0]}"] = [sum(pairs), len(pairs)]


def part_leak(part: Part) -> None:
    """Many short requests with stops, aborts by length and shared prefixes; SGLang counts its slots at every step."""
    options, dice = part.options, random.Random(0)  # noqa: S311  (traffic, not secrets)
    base = prompts(options, 16)
    vocabulary = 250  # both pairs have more tokens
    batch = 4 if options.cpu else 200
    calls = []
    for start in range(0, options.requests, batch):
        ids = [
            [*dice.choice(base)[: dice.randrange(1, 200)], dice.randrange(vocabulary)]
            for _ in range(min(batch, options.requests - start))
        ]
        sampling = [
            {
                "temperature": dice.choice((0, 0, 0.8)),
                "max_new_tokens": dice.randrange(1, 6 if options.cpu else 48),
                "stop_token_ids": [dice.randrange(vocabulary) for _ in range(3)],
            }
            for _ in ids
        ]
        calls.append({"input_ids": ids, "sampling_params": sampling})
    pool = 512 if options.cpu else 4096
    context = 256 if options.cpu else 4096
    whole = pool - -(-(options.budget + 1) // 16) * 16  # the last step needs its own pages
    whole = min(whole, context) - 12
    calls.append(greedy([[7] * (whole - 4)], 4))
    extra = {"page_size": 16, "max_total_tokens": pool, "context_length": context}
    arm = part.engine("leak", calls, **part.drafting("DDTREE"), **extra)
    result = part.done(arm)
    if not result:
        return
    finished = sum(len(call["output_ids"]) for call in result["calls"][:-1])
    reasons = {
        kind: sum((reason or {}).get("type") == kind for call in result["calls"][:-1] for reason in call["finish"])
        for kind in ("length", "stop", "abort")
    }
    log = arm.log.read_text(errors="replace")
    retracted = log.count("Retract requests")
    passed = finished == options.requests and reasons["abort"] == 0 and "leak detected" not in log.lower()
    part.check("no slot is lost", passed, f"{finished} requests, {reasons}, {retracted} retractions, pages of 16")
    last = result["calls"][-1]
    part.check("the whole pool can still be used", len(last["output_ids"][0]) == 4, f"a request of {whole} of {pool}")
