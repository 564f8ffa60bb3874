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
#: Requests of a large batch, and the part of DFLASH's operations that a tree's step may take there. SGLang's kernel for
#: its table is two operations a request on a CPU, for both.
MANY = 32
PART = {harness.RELEASE: 0.4, harness.SECOND_RELEASE: 1.0}
#: Operations a request with which DFLASH reserves slots and a tree does not: three lengths written, one read.
LENGTHS = 4


def queue(engines: Engines, sites: Sites) -> None:
    """Both arms of one release of each generation."""
    for version in VERSIONS:
        here = Release(engines, sites, version, ahead=version in harness.SECOND_WORKER)
        for algorithm in ("DFLASH", "DDTREE"):
            extra: dict[str, Any] = {"disable_overlap_schedule": version in harness.FIRST_WORKER}
            if algorithm == "DDTREE":
                extra["speculative_ddtree_budget"] = 16
            name = f"{algorithm} {version}"
            room = {"max_running_requests": MANY, "max_total_tokens": 16384}
            # Requests reach the scheduler one by one: the first ones must still decode when the last one comes.
            calls = [harness.greedy(harness.prompts(0, 1, 3), 24), harness.greedy(harness.prompts(*range(MANY)), 128)]
            args = harness.engine_args(algorithm, **room | extra)
            here.start(name, args, calls, DDTREE_COUNT=str(engines.folder / f"{name}.count"))


def steps(engines: Engines, name: str) -> list[dict[str, Any]]:
    """The decode steps of an arm."""
    engines[name]
    found = harness.read_lines(engines.folder / f"{name}.count")
    assert len(found) > 3
    return found


def operations(engines: Engines, version: str) -> list[tuple[int, float, float]]:
    """Each batch size that both arms have decoded, with the operations of a tree's step and of a chain's.

    Which ones there are is a matter of time: requests reach the scheduler one by one, and leave it so.
    """
    arms = []
    for algorithm in ("DDTREE", "DFLASH"):
        counts: dict[int, list[int]] = {}
        for step in steps(engines, f"{algorithm} {version}"):
            counts.setdefault(step["batch"], []).append(step["operations"])
        arms.append({size: median(found) for size, found in counts.items()})
    return [(size, arms[0][size], arms[1][size]) for size in sorted(arms[0].keys() & arms[1].keys())]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_tree_costs_no_more_launches_than_a_chain(engines: Engines, version: str) -> None:
    """And it is one launch each for tree, mask, acceptance."""
    few = [counts for counts in operations(engines, version) if counts[0] <= 3]
    assert few
    assert all(tree <= chain for _, tree, chain in few), few
    for step in steps(engines, f"DDTREE {version}"):
        assert all(step["names"][name] == 1 for name in ("build_tree", "write_tree_mask", "accept"))


@pytest.mark.parametrize("version", VERSIONS)
def test_launches_do_not_grow_with_the_batch(engines: Engines, version: str) -> None:
    """From few requests to many they grow no more than DFLASH's, which SGLang's own part of a step is behind."""
    (few, tree, chain), *_, (many, tree_of_many, chain_of_many) = operations(engines, version)
    assert many > few + MANY // 4
    assert tree_of_many - tree <= chain_of_many - chain


def at_most_requests(engines: Engines, version: str) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """The largest batch that both arms have decoded, and their steps of it.

    Not always all 32: one that reaches the scheduler before the others is decoded apart from them.
    """
    arms = {algorithm: steps(engines, f"{algorithm} {version}") for algorithm in ("DDTREE", "DFLASH")}
    largest = max(set.intersection(*({step["batch"] for step in arm} for arm in arms.values())))
    assert largest > MANY // 2
    return largest, {name: [step for step in arm if step["batch"] == largest] for name, arm in arms.items()}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_large_batch_costs_the_host_a_part_of_a_chain_s_operations(engines: Engines, version: str) -> None:
    """DFLASH's first worker reads every request's tokens by themselves; plain decoding beat it at 32 requests."""
    _, arms = at_most_requests(engines, version)
    tree, chain = (median(step["operations"] for step in arms[name]) for name in ("DDTREE", "DFLASH"))
    assert tree <= PART[version] * chain


def test_slots_are_reserved_without_an_operation_for_each_length(engines: Engines) -> None:
    """DFLASH's second worker writes three tensors and reads one request by request."""
    batch, arms = at_most_requests(engines, harness.SECOND_RELEASE)
    tree, chain = (max(step["reserved"] for step in arms[name]) for name in ("DDTREE", "DFLASH"))
    assert 0 < tree <= chain - LENGTHS * batch


@pytest.mark.parametrize("version", VERSIONS)
def test_a_step_asks_the_device_for_no_number_of_its_own(engines: Engines, version: str) -> None:
    """`item`, in whatever form; the first worker's copy of what was accepted is none of them."""
    for step in steps(engines, f"DDTREE {version}"):
        assert not {"aten._local_scalar_dense.default", "aten.item.default"} & step["names"].keys()
