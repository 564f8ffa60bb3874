# SPDX-License-Identifier: Apache-2.0
"""Does sampled output have the target's distribution? exact.py JOB.json RESULT.json, with the engine's Python.

The job: {"target": folder, "cases": {name: {"prompt": [...], "sampling_params": {...}, "outputs": [[...]],
"children": [[[...]]], "replaced": 0.1}}}; `children[r][i]` are the draft tokens that stood where token i of output r
was drawn, or null in the prefill. The exact distribution after each prefix is a forward pass of the target in float64,
with SGLang's filters written out again. Each token is put into a cell by its place in the output and by how much of the
distribution's support was drafted: "all", "some", "none" of it, or "leaf" where no token was. Per case and cell:
draws, p-value of a chi-square over all prefixes, and draws of tokens that cannot be drawn; per case the p-value of all
cells together and of how often the first draft was drawn, as drawn and with a share of the draws replaced by the first
draft: what a biased rule would give.
"""

import json
import random
import sys
from collections import Counter, defaultdict

import torch
from scipy import stats


#: Probability that counts as none: below the resolution of the engine's float32.
NOTHING = 1e-7
#: Fewest expected draws in a cell of the chi-square.
FEWEST = 10.0


def distributions(model, prompt, prefixes):
    """Logits after prompt + prefix for every prefix, float64, one forward pass for each length."""
    by_length = defaultdict(list)
    for prefix in prefixes:
        by_length[len(prefix)].append(prefix)
    logits = {}
    for same in by_length.values():
        for start in range(0, len(same), 256):
            part = same[start : start + 256]
            ids = torch.tensor([[*prompt, *prefix] for prefix in part])
            with torch.no_grad():
                last = model(ids).logits[:, -1]
            logits.update(zip(part, last, strict=True))
    return logits


def filtered(logits, prefix, params, slack=0.0):
    """Probabilities that SGLang draws from after a prefix; `slack` widens the filters by a share of their limits."""
    logits = logits.clone()
    for token, count in Counter(prefix).items():
        logits[token] -= params.get("frequency_penalty", 0.0) * count + params.get("presence_penalty", 0.0)
        penalty = params.get("repetition_penalty", 1.0)
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token, bias in params.get("logit_bias", {}).items():
        logits[int(token)] += bias
    probs, order = torch.softmax(logits / params["temperature"], dim=-1).sort(descending=True, stable=True)
    before = probs.cumsum(-1) - probs
    kept = torch.ones_like(probs, dtype=torch.bool)
    if params.get("top_k", -1) > 0:
        kept[params["top_k"] :] = False
    kept &= before <= params.get("top_p", 1.0) * (1 + slack)
    kept &= probs >= probs[0] * params.get("min_p", 0.0) * (1 - slack)
    result = torch.zeros_like(probs)
    result[order] = torch.where(kept, probs, 0.0)
    return result / result.sum()


def coverage(probs, children):
    """How much of the support the drafted tokens cover."""
    if not children:
        return "leaf"
    mass = float(probs[sorted(set(children))].sum())
    return "all" if mass > 1 - NOTHING else "some" if mass > NOTHING else "none"


class ChiSquare:
    """A sum of chi-squares over prefixes, each against its own distribution; rare prefixes and tokens are pooled."""

    def __init__(self):
        self.statistic, self.freedom = 0.0, 0
        self._rare, self._rare_expected = Counter(), 0.0

    def add(self, counts, probs):
        """The tokens drawn after one prefix."""
        expected = probs * sum(counts.values())
        if not self._cells(counts, expected):
            self._rare, self._rare_expected = self._rare + counts, self._rare_expected + expected

    def _cells(self, counts, expected):
        frequent = (expected >= FEWEST).nonzero().flatten().tolist()
        cells = [(counts[token], float(expected[token])) for token in frequent]
        rest = (sum(counts.values()) - sum(c for c, _ in cells), float(expected.sum()) - sum(e for _, e in cells))
        if rest[1] >= FEWEST:
            cells.append(rest)
        elif cells:  # too little for a cell of its own
            cells[-1] = (cells[-1][0] + rest[0], cells[-1][1] + rest[1])
        if len(cells) < 2:
            return False
        self.statistic += sum((count - expect) ** 2 / expect for count, expect in cells)
        self.freedom += len(cells) - 1
        return True

    def close(self):
        """The rare prefixes together; then the p-value, or None when there was too little of everything."""
        if self._rare:
            self._cells(self._rare, self._rare_expected)
            self._rare = Counter()
        return float(stats.chi2.sf(self.statistic, self.freedom)) if self.freedom else None


def judge(model, case):
    """Every cell of a case, and all cells behind the prefill together: as drawn, and with some draws replaced."""
    prompt, params = case["prompt"], case["sampling_params"]
    outputs = [tuple(output) for output in case["outputs"]]
    prefixes = sorted({output[:at] for output in outputs for at in range(len(output))})
    logits = distributions(model, prompt, prefixes)
    exact = {prefix: filtered(logits[prefix], prefix, params) for prefix in prefixes}
    cells, outside = defaultdict(lambda: defaultdict(Counter)), Counter()
    replaced, draw = defaultdict(lambda: defaultdict(Counter)), random.Random(0)
    first = {}
    for output, children in zip(outputs, case["children"], strict=True):
        for at, token in enumerate(output):
            prefix, drafts = output[:at], children[at]
            cell = at + 1, "prefill" if drafts is None else coverage(exact[prefix], drafts)
            cells[cell][prefix][token] += 1
            if drafts:
                first[prefix] = drafts[0]
            replaced[cell][prefix][drafts[0] if drafts and draw.random() < case["replaced"] else token] += 1
            if exact[prefix][token] == 0:
                outside[cell] += bool(filtered(logits[prefix], prefix, params, slack=1e-4)[token] == 0)
    found = []
    for (place, kind), by_prefix in sorted(cells.items()):
        test = ChiSquare()
        for prefix, counts in by_prefix.items():
            test.add(counts, exact[prefix])
        draws = sum(sum(counts.values()) for counts in by_prefix.values())
        cell = {"place": place, "covered": kind, "draws": draws, "p": test.close(), "freedom": test.freedom}
        found.append(cell | {"outside": outside[place, kind]})
    return {"cells": found, "together": together(cells, exact, first), "replaced": together(replaced, exact, first)}


def together(cells, exact, first):
    """p-values over all cells but those of the prefill: the chi-square, and how often the first draft was drawn."""
    test, drawn, expected, variance = ChiSquare(), 0, 0.0, 0.0
    for (_, kind), by_prefix in sorted(cells.items()):
        for prefix, counts in by_prefix.items() if kind != "prefill" else ():
            test.add(counts, exact[prefix])
            if prefix in first:
                share, draws = float(exact[prefix][first[prefix]]), sum(counts.values())
                drawn, expected = drawn + counts[first[prefix]], expected + draws * share
                variance += draws * share * (1 - share)
    first_p = float(2 * stats.norm.sf(abs(drawn - expected) / variance**0.5)) if variance else None
    return {"chi-square": test.close(), "first draft": first_p}


def main(job_file, result_file):
    """Judge every case."""
    from transformers import AutoModelForCausalLM

    with open(job_file) as source:
        job = json.load(source)
    model = AutoModelForCausalLM.from_pretrained(job["target"], dtype=torch.float64).eval()
    with open(result_file, "w") as target:
        torch.set_num_threads(1)
        json.dump({name: judge(model, case) for name, case in job["cases"].items()}, target)


if __name__ == "__main__":
    main(*sys.argv[1:3])
