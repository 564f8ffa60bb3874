# SPDX-License-Identifier: Apache-2.0
"""Calibrated trees in the real engine: the same tokens, whatever the exponents become."""

from __future__ import annotations

from typing import Any

import pytest
from tests.engine import harness
from tests.engine.engines import Engines, Release, Sites


CALLS = [harness.greedy(harness.prompts(0, 1, 3, 5), 48), harness.greedy(harness.prompts(2), 48)]
RELEASES = (harness.RELEASE, harness.SECOND_RELEASE)


def queue(engines: Engines, sites: Sites) -> None:
    """Both workers with and without a fit."""
    for version in RELEASES:
        here = Release(engines, sites, version, ahead=version in harness.SECOND_WORKER)
        if version == harness.RELEASE:
            here.start("plain", harness.engine_args(None), CALLS)
        for mode in ("auto", "off", "1.5"):
            name = f"{version} {mode}"
            args = harness.engine_args(
                "DDTREE", speculative_ddtree_budget=7, speculative_ddtree_calibration=mode,
                disable_overlap_schedule=version == harness.RELEASE,
            )  # fmt: skip
            here.start(name, args, CALLS, SGLANG_DDTREE_TRACE=engines.trace_file(name))


def outputs(result: dict[str, Any]) -> list[list[list[int]]]:
    return [call["output_ids"] for call in result["calls"]]


def accept_length(result: dict[str, Any]) -> float:
    tokens = sum(len(ids) for call in result["calls"] for ids in call["output_ids"])
    return tokens / sum(spec["spec_verify_ct"] for call in result["calls"] for spec in call["spec"])


def root_scores(engines: Engines, name: str) -> list[float]:
    """Score of the first node of each tree of the first request."""
    lines = engines.trace(name)
    return [line["scores"][1] for line in lines if line["rid"] == lines[0]["rid"]]


@pytest.mark.parametrize("mode", ["auto", "off", "1.5"])
@pytest.mark.parametrize("version", RELEASES)
def test_output_equals_plain_decoding(engines: Engines, version: str, mode: str) -> None:
    """Exponents choose what is tried, never what is emitted."""
    assert outputs(engines[f"{version} {mode}"]) == outputs(engines["plain"])


@pytest.mark.parametrize("version", RELEASES)
def test_fit_starts_at_one_and_moves(engines: Engines, version: str) -> None:
    """The first trees are those of the drafter's own probabilities; this drafter understates, so later ones are not."""
    fitted, off, given = (root_scores(engines, f"{version} {mode}") for mode in ("auto", "off", "1.5"))

    told = engines[f"{version} auto"]["server_info"]["ddtree_calibration"]
    assert told["labels"][0] > 40
    assert max(told["exponents"]) > 1.2, told
    assert fitted[0] == pytest.approx(off[0], abs=1e-5)
    assert given[0] != pytest.approx(off[0], abs=1e-3)
    assert accept_length(engines[f"{version} auto"]) > accept_length(engines[f"{version} off"])
