# SPDX-License-Identifier: Apache-2.0
"""A verify step of a tree through the FlashAttention and FlashInfer backends of the first worker's SGLangs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from tests.engine import harness


CASES = [
    f"{backend} {page} {role} {how}"
    for backend in ("fa3", "flashinfer")
    for page in (1, 16)
    for role in ("target", "draft")
    for how in ("eager", "replay")
]


@pytest.fixture(scope="module", params=harness.FIRST_WORKER)
def worst(request: pytest.FixtureRequest, sites: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The largest difference of any node's output to attention over its own mask, by case."""
    results = tmp_path_factory.mktemp("verify_step") / "results.json"
    command = [harness.ENGINE_PYTHON, harness.PROJECT / "tests/engine/verify_step.py", results]
    environment = harness.engine_environment(sites[request.param])
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(results.read_text())


@pytest.mark.parametrize("case", CASES)
def test_a_node_attends_by_the_mask(worst: dict[str, float], case: str) -> None:
    """Prefixes that differ and one at the end of the context, padding nodes, pages, a graph wider than the batch.

    The draft's backend has neither mask nor tree: its block sees all of itself.
    """
    assert worst[case] < 1e-5
    assert set(worst) == set(CASES)
