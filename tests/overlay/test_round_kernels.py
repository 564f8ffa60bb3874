# SPDX-License-Identifier: Apache-2.0
"""The kernels of a round against their references, in Triton's interpreter."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch


sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import kernel_checks
import kernel_times


@pytest.mark.parametrize(
    ("batch", "horizon", "choices", "budget"), [(1, 1, 1, 1), (3, 15, 16, 16), (2, 3, 2, 33), (2, 5, 40, 65)]
)
def test_tree_mask_and_acceptance_equal_their_references(batch: int, horizon: int, choices: int, budget: int) -> None:
    """Ties, NaN rows, padding, links, a verify narrower than the tree, whole masks and tails, root-only requests."""
    kernel_checks.compare_round(batch, horizon, choices, budget, seed=budget)


@pytest.mark.parametrize(("batch", "choices"), [(1, 1), (3, 16), (18, 5)])
def test_fit_equals_its_reference(batch: int, choices: int) -> None:
    """Some steps from exponents of 1, root-only requests among them."""
    kernel_checks.compare_fit(batch, choices, seed=batch)


@pytest.mark.parametrize(
    ("shape", "ranks", "cap", "seed"),  # rows, original and added tokens, choices, type
    [
        ((3, 97, 2, 16, torch.bfloat16), 1, None, 3),
        ((3, 97, 0, 128, torch.float32), 1, None, 2),  # fewer tokens than choices
        ((4, 5003, 3, 7, torch.float16), 1, 3.0, 3),  # two tiles
        ((3, 1003, 3, 16, torch.float32), 2, None, 2),
        ((3, 150, 3, 5, torch.bfloat16), 4, 30.0, 3),
    ],
)
def test_head_equals_its_reference(shape: tuple, ranks: int, cap: float | None, seed: int) -> None:
    """Ids exactly, sums to float32's rounding: ties (odd seeds), NaN, rows of -inf, padding, added tokens, ranks."""
    kernel_checks.compare_head(*shape, ranks=ranks, cap=cap, seed=seed)


def test_what_has_a_bound_is_timed_first_and_every_figure_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is cut keeps what it has; the tables are ascending."""
    out, order = tmp_path / "out.json", []

    def timed(name: str, key: str) -> Any:
        def time_one(batch: int, budget: int) -> dict[str, int]:
            order.append((name, batch, budget))
            written = json.loads(out.read_text()) if out.exists() else {"rounds": [], "heads": []}
            assert len(written["rounds"]) + len(written["heads"]) == len(order) - 1
            return {"batch": batch, key: budget}

        return time_one

    monkeypatch.setattr(kernel_times, "time_round", timed("round", "budget"))
    monkeypatch.setattr(kernel_times, "time_head", timed("head", "k"))
    monkeypatch.setattr(kernel_times, "name_of_machine", lambda: "here")
    rounds, heads = kernel_times.time_all((1, 32), (16, 64), out)
    assert order[:4] == [("round", 1, 64), ("round", 32, 64), ("head", 1, 64), ("head", 32, 64)]
    assert [line["budget"] for line in rounds] == [line["k"] for line in heads] == [16, 16, 64, 64]
