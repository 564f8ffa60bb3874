# SPDX-License-Identifier: Apache-2.0
"""The rule by which `scripts/gpu_prove` judges a difference to plain decoding, in a real engine on the CPU."""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine import harness


sys.path.insert(0, str(harness.PROJECT / "scripts"))

from gpu_proofs import judging, parts
from gpu_proofs.calls import texts
from gpu_proofs.checks import Part
from gpu_proofs.engines import Arm, Machine


class Written:
    """An arm whose result is at hand: plain decoding's own, with tokens replaced."""

    def __init__(self, result: dict[str, Any]) -> None:
        self.result = lambda: result


@pytest.fixture(scope="module")
def part(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Part]:
    """A part of a run on the CPU."""
    options = argparse.Namespace(
        site=site,
        pair=harness.PAIR,
        python=str(harness.ENGINE_PYTHON),
        cpu=True,
        limit=3000,
        judging=60,
        at_once=1,
        budget=16,
    )
    machine = Machine(options, tmp_path_factory.mktemp("judging"))
    yield Part(machine, "test")
    machine.close()


@pytest.fixture(scope="module")
def plain(part: Part) -> Arm:
    """A plain engine that stays."""
    return parts.plain_engine(part, texts(part.options))


def test_plain_decoding_of_float32_shifts_no_gap(plain: Arm) -> None:
    """A clean prefill of a decoded text gives the log-probabilities that decoding gave, position by position."""
    measured = judging.noise(plain)

    assert measured
    assert measured["n"] == sum(len(ids) for call in plain.result()["calls"] for ids in call["output_ids"])
    assert measured["bound"] <= judging.ALLOWANCE * measured["largest"] < 2e-3 < measured["gap"]
    assert measured["within"] < 0.1


def test_a_few_shifts_far_out_do_not_widen_the_bound() -> None:
    """One position in two hundred shifts by more than all gaps are wide: the bound stays that of the others."""
    tops = [[[-1.0, 1], [-1.5, 2]]] * 200
    result = {"calls": [{"input_ids": [[7]], "output_ids": [[1] * 200], "tops": [tops]}]}
    clean = [[-1.0, -1.4]] * 199 + [[-9.0, -1.4]]
    arm: Any = Written(result)
    arm.more = lambda _calls: [{"logprobs": [clean]}]

    measured = judging.measured_noise(arm)

    assert measured
    assert measured["bound"] == pytest.approx(2 * 0.1)
    assert measured["largest"] > 8


@pytest.mark.parametrize("at", [0, 3])
def test_a_token_the_target_does_not_prefer_is_found(part: Part, plain: Arm, at: int) -> None:
    """An arm that takes the second token where the first is far ahead fails; one that writes plain's text passes."""
    right = plain.result()
    wrong = copy.deepcopy(right)
    row, tops = wrong["calls"][1]["output_ids"][1], wrong["calls"][1]["tops"][1][at]
    row[at] = tops[1][1]
    before = len(part.rows)

    judging.judge(part, plain, {"right": Written(right), "wrong": Written(wrong)})

    assert {row["check"]: row["result"] for row in part.rows[before:]} == {
        "rounding of plain decoding explains few gaps": "ok",
        "right against plain": "ok",
        "wrong against plain": "FAILED",
        "plain at other batch sizes against plain": "ok",
    }
    assert part.facts["gaps"]["wrong"] == [pytest.approx(tops[0][0] - tops[1][0], abs=1e-3)]


def test_plain_decoding_is_judged_beside_its_own_largest_batch(plain: Arm) -> None:
    """A smaller batch that wrote another token than the largest one for the same prompt is a difference."""
    result = copy.deepcopy(plain.result())
    smaller = result["calls"][0]["output_ids"][0]
    smaller[3] += 1

    (found,), compared = judging.differences(result, judging.at_other_sizes(result))

    assert found == (result["calls"][0]["input_ids"][0] + smaller[:3], smaller[3], smaller[3] - 1)
    assert compared == sum(len(call["input_ids"]) for call in result["calls"]) - 2 * len(
        result["calls"][-1]["input_ids"]
    )
