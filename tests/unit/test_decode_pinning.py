# SPDX-License-Identifier: Apache-2.0
"""Which cores the processes of a measured engine get, on this machine's own processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.waiting import until


sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import decode_pinning


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6, 16])
def test_the_scheduler_shares_no_core(count: int) -> None:
    """However few there are, and a core's two threads belong to one role."""
    cores = [[2 * core, 2 * core + 1] for core in range(count)]
    plan = decode_pinning.layout(cores)
    scheduler = set(plan.pop("scheduler"))
    assert set(plan) == {"client", "detokenizer", "benchmark"}
    for cpus in plan.values():
        assert cpus in cores
        assert not scheduler & set(cpus)
    if count >= 4:
        assert plan["client"] != plan["detokenizer"] != plan["benchmark"]


def test_a_single_core_gives_no_plan() -> None:
    """Then the run says that it is not pinned."""
    assert decode_pinning.layout([[0, 1]]) == {}


def test_every_cpu_is_of_one_core() -> None:
    """Of those that this process may use."""
    assert sorted(cpu for core in decode_pinning.physical_cores() for cpu in core) == sorted(os.sched_getaffinity(0))


@pytest.fixture
def engine() -> Iterator[int]:
    """Processes with the titles of an engine's, below one without."""
    before = os.sched_getaffinity(0)
    titles = "(exec -a sglang::scheduler sleep 600) & (exec -a sglang::detokenizer sleep 600) & wait"
    with subprocess.Popen(["bash", "-c", titles], start_new_session=True) as process:
        until(lambda: {"scheduler", "detokenizer"} <= set(decode_pinning.processes(process.pid).values()))
        yield process.pid
        os.killpg(process.pid, 9)
    os.sched_setaffinity(0, before)


def test_processes_run_where_they_were_told(engine: int) -> None:
    """By what the kernel says, every thread of them."""
    cpus = sorted(os.sched_getaffinity(0))
    plan = {"scheduler": cpus[:1], "client": cpus[-1:], "detokenizer": cpus[-1:], "benchmark": cpus}
    found = decode_pinning.pin_engines({"plain": engine}, plan)
    assert found["plain"] == {"client": [cpus[-1:]], "scheduler": [cpus[:1]], "detokenizer": [cpus[-1:]]}
    assert found["benchmark"] == {"benchmark": [cpus]}
    for pid, role in decode_pinning.processes(engine).items():
        assert os.sched_getaffinity(pid) == set(plan[role])
