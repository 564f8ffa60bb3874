# SPDX-License-Identifier: Apache-2.0
"""Sampled traffic whose distribution is known exactly, and the cells it must fill."""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.engine import harness


#: Requests of a case, and tokens of each.
DRAWS, NEW_TOKENS = 250, 5
PROMPT = harness.prompts(1)[0][:40]
#: Goes on with blanks, which are drafted and taken in paths where nothing is penalised.
BLANKS = list(b"class A:\n    def f(self):\n        if x:\n   ")
#: Share of draws that a biased rule is taken to replace by the drafter's choice; the judge has to see it.
BIAS = 0.15

#: Letters that the drafter proposes most, forbidden to the target alone: drafted tokens that cannot be drawn.
FORBIDDEN = {str(byte): -200.0 for byte in b" etaoinsrlcdpfmu_"}

CASES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.0},
    "top-k": {"temperature": 1.3, "top_k": 2},
    # So hot that a draw without its temperature is another distribution; each filter still takes tokens away.
    "top-p and min-p": {"temperature": 3.0, "top_k": 8, "top_p": 0.4, "min_p": 0.25},
    "forbidden drafts": {"temperature": 1.0, "logit_bias": FORBIDDEN},
    "penalised": {"temperature": 0.8, "frequency_penalty": 1.5, "presence_penalty": 0.5},
    "penalised blanks": {"temperature": 0.8, "frequency_penalty": 2.0, "presence_penalty": 2.0},
}
PROMPTS = dict.fromkeys(CASES, PROMPT) | {"penalised blanks": BLANKS}
#: Cases of an engine by its budget: the widest tree serves all.
SERVED = {1: ("temperature", "top-k"), 4: ("temperature", "top-k"), 16: tuple(CASES)}


def calls(budget: int) -> list[dict[str, Any]]:
    """A call a case: requests alike, and every 50th a greedy one among them."""
    greedy = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    every = []
    for name in SERVED[budget]:
        sampled = CASES[name] | {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        parameters = [greedy if is_greedy(at) else sampled for at in range(DRAWS)]
        every.append({"input_ids": [PROMPTS[name]] * DRAWS, "sampling_params": parameters})
    return every


#: A p-value below this is a fault. With about eighty of them, some of few expected draws, a right engine fails once in
#: thousands of runs.
LEVEL = 1e-7


def faults(judged: dict[str, Any]) -> list[Any]:
    """What of a case cannot be drawn from the target's distribution."""
    found = [c for c in judged["cells"] if c["outside"] or (c["p"] is not None and c["p"] < LEVEL)]
    return found + [p for p in judged["together"].items() if p[1] < LEVEL]


def is_greedy(at: int) -> bool:
    """Whether request `at` of a call is one of the greedy ones."""
    return at % 50 == 25


def arguments(budget: int) -> dict[str, Any]:
    """An engine that decodes many requests at once."""
    return harness.engine_args(
        "DDTREE", speculative_ddtree_budget=budget, max_running_requests=128, max_total_tokens=8192
    )


def judge(budget: int, result: dict[str, Any], trace: list[dict[str, Any]], folder: Path) -> dict[str, dict[str, Any]]:
    """What `exact.py` says of each case's outputs.

    Args:
        budget: The engine's.
        result: Of an engine that ran `calls`.
        trace: Its trees.
        folder: For the job's files.
    """
    steps = defaultdict(list)
    for step in trace:
        steps[step["rid"]].append(step)
    cases = {}
    for name, call in zip(SERVED[budget], result["calls"], strict=True):
        rows = [at for at in range(len(call["output_ids"])) if not is_greedy(at)]
        cases[name] = {
            "prompt": PROMPTS[name],
            "sampling_params": CASES[name],
            "replaced": BIAS,
            "outputs": [call["output_ids"][at] for at in rows],
            "children": [drafted(steps[call["rids"][at]], len(call["output_ids"][at])) for at in rows],
        }
    folder.mkdir(parents=True, exist_ok=True)
    job, found = folder / "job.json", folder / "found.json"
    job.write_text(json.dumps({"target": str(harness.PAIR / "target"), "cases": cases}))
    script = harness.PROJECT / "tests/engine/exact.py"
    subprocess.run([harness.ENGINE_PYTHON, script, job, found], check=True, timeout=1500)
    judged: dict[str, dict[str, Any]] = json.loads(found.read_text())
    return judged


def drafted(steps: list[dict[str, Any]], length: int) -> list[list[int] | None]:
    """The draft tokens at the place of each output token: children of the node that it was drawn at."""
    children: list[list[int] | None] = [None]  # the first token comes from the prefill
    for step in steps:
        below: dict[int, list[int]] = defaultdict(list)
        for node, parent in enumerate(step["parents"]):
            if node and parent >= 0:
                below[parent].append(step["tokens"][node])
        children += [below[node] for node in step["path"][: step["committed"]]]
    assert len(children) == length
    return children
