# SPDX-License-Identifier: Apache-2.0
"""What a decode step launches one by one, counted in the real engine beside DFLASH's step.

On a CPU the operations are not those of a GPU, for both arms: DFLASH accepts with a dozen of them in the place of one
kernel. A function of the overlay that is one launch on a GPU counts as one. `scripts/gpu_prove steps` counts on a GPU.
"""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest
from tests.engine import harness
from tests.engine.engines import Engines, Release, Sites


VERSIONS = (harness.RELEASE, harness.SECOND_RELEASE)
#: Waits for the device that DFLASH's own part of a step has in the first worker.
WAITS = {harness.RELEASE: 2, harness.SECOND_RELEASE: 0}


def queue(engines: Engines, sites: Sites) -> None:
    """Both arms of one release of each generation."""
    for version in VERSIONS:
        here = Release(engines, sites, version, ahead=version in harness.SECOND_WORKER)
        for algorithm in ("DFLASH", "DDTREE"):
            extra: dict[str, Any] = {"disable_overlap_schedule": version in harness.FIRST_WORKER}
            if algorithm == "DDTREE":
                extra["speculative_ddtree_budget"] = 16
            name = f"{algorithm} {version}"
            args, calls = harness.engine_args(algorithm, **extra), [harness.greedy(harness.prompts(0, 1, 3), 24)]
            here.start(name, args, calls, DDTREE_COUNT=str(engines.folder / f"{name}.count"))


def steps(engines: Engines, name: str) -> list[dict[str, Any]]:
    """The decode steps of an arm."""
    engines[name]
    found = harness.read_lines(engines.folder / f"{name}.count")
    assert len(found) > 3
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_a_tree_costs_no_more_launches_than_a_chain(engines: Engines, version: str) -> None:
    """And it is one launch each for tree, mask, acceptance."""
    tree, chain = (steps(engines, f"{algorithm} {version}") for algorithm in ("DDTREE", "DFLASH"))
    assert median(step["operations"] for step in tree) <= median(step["operations"] for step in chain)
    for step in tree:
        assert all(step["names"][name] == 1 for name in ("build_tree", "write_tree_mask", "accept"))


@pytest.mark.parametrize("version", VERSIONS)
def test_launches_do_not_grow_with_the_batch(engines: Engines, version: str) -> None:
    """From one request to three it grows no more than DFLASH's, which SGLang's own part of a step is behind."""
    grown = {}
    for algorithm in ("DDTREE", "DFLASH"):
        counts = {step["batch"]: step["operations"] for step in steps(engines, f"{algorithm} {version}")}
        grown[algorithm] = counts[3] - counts[1]
    assert grown["DDTREE"] <= grown["DFLASH"]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_step_asks_the_device_for_no_number_of_its_own(engines: Engines, version: str) -> None:
    """`item`, in whatever form; the first worker's copy of what was accepted is none of them."""
    for step in steps(engines, f"DDTREE {version}"):
        assert step["names"].get("aten._local_scalar_dense.default", 0) <= WAITS[version]
