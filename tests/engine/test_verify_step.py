# SPDX-License-Identifier: Apache-2.0
"""A verify step of a tree through the FlashAttention and FlashInfer backends of the first worker's SGLangs."""

from __future__ import annotations

import pytest
from tests.engine import harness
from tests.engine.engines import Engines, Release, Sites


CASES = [
    f"{backend} {page} {role} {how}"
    for backend in ("fa3", "flashinfer")
    for page in (1, 16)
    for role in ("target", "draft")
    for how in ("eager", "replay")
]


def queue(engines: Engines, sites: Sites) -> None:
    """The largest difference of any node's output to attention over its own mask, by case."""
    for version in harness.FIRST_WORKER:
        Release(engines, sites, version, ahead=False).script(version, "verify_step.py")


@pytest.mark.parametrize("version", harness.FIRST_WORKER)
@pytest.mark.parametrize("case", CASES)
def test_a_node_attends_by_the_mask(engines: Engines, version: str, case: str) -> None:
    """Prefixes that differ and one at the end of the context, padding nodes, pages, a graph wider than the batch.

    The draft's backend has neither mask nor tree: its block sees all of itself.
    """
    worst = engines[version]
    assert worst[case] < 1e-5
    assert set(worst) == set(CASES)
