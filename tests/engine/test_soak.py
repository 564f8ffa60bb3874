# SPDX-License-Identifier: Apache-2.0
"""A fixed sample of the random traffic that `make soak` draws."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engine import harness
from tests.engine.soak import draw_group, run_group


@pytest.mark.parametrize("seed", [1, 2])
def test_random_traffic_equals_plain_decoding(site: Path, tmp_path: Path, seed: int) -> None:
    """Requests that join, leave, are aborted, retracted, cut, penalised or drawn: each greedy one gets plain tokens."""
    target = harness.text_target(tmp_path / "target")

    found, _ = run_group(site, target, draw_group(seed, 12), tmp_path)

    assert found == []


def test_a_seed_gives_the_same_traffic() -> None:
    """What a failure prints repeats it."""
    assert draw_group(7, 5) == draw_group(7, 5)
    assert draw_group(7, 5) != draw_group(8, 5)
