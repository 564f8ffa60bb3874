# SPDX-License-Identifier: Apache-2.0
"""Every engine the tests need, two at a time: an engine takes about half a minute to start and decode."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.engine import harness, scenarios

from ddtree_overlay.wheels import wheel_of


BUDGETS = (1, 3, 7, 16, 63)
#: Prompts of 7, 64 and 40 bytes.
ONE, THREE = harness.prompts(0), harness.prompts(0, 1, 3)
CALLS = [harness.greedy(ONE), harness.greedy(THREE)]
#: What runs in an engine whose KV pool is too small for it, and whose prompts are prefilled in pieces.
TIGHT = scenarios.FLOWS["7, 330 and 64 tokens together"] * 2 + scenarios.FLOWS["hits in the prefix cache"]
#: Of the releases beside the one of the whole matrix.
RELEASE_FLOWS = ("joining and leaving", "penalised among others", "stop strings inside a path")

#: One piece of the overlay broken on purpose: file, what it holds, what it holds instead.
BREAKS = {
    "mask": (
        "tree_mask.py",
        "rows[:, prefix_len:] = ancestors",
        "rows[:, prefix_len:] = torch.ones_like(ancestors).tril()",
    ),
    "positions": (
        "tree_reference.py",
        "prefix_lens.to(torch.int64).unsqueeze(1) + depths",
        "prefix_lens.to(torch.int64).unsqueeze(1) + torch.arange(depths.shape[1])",
    ),
    # DFLASH's rule: the first rows instead of the path's.
    "commit": (
        "verify_input.py",
        "for node in paths[request][:count]",
        "for node in range(len(paths[request][:count]))",
    ),
}


class Engines:
    """Runs engine jobs by name and keeps their results."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pool = ThreadPoolExecutor(max_workers=int(os.environ.get("DDTREE_TEST_ENGINES", "2")))
        self._jobs: dict[str, Future[dict[str, Any]]] = {}

    def start(
        self, name: str, site: Path, args: dict[str, Any], calls: list[dict[str, Any]], **environment: str
    ) -> None:
        """Queue a job; its trace files lie in `folder / name`."""
        folder = self.folder / name
        self._jobs[name] = self._pool.submit(harness.decode, site, args, calls, folder, **environment)

    def __getitem__(self, name: str) -> dict[str, Any]:
        """The result of a job, waited for."""
        return self._jobs[name].result()

    def trace(self, name: str) -> list[dict[str, Any]]:
        """The trees (or chains) that the job verified."""
        self[name]
        return harness.read_lines(self.folder / name / "trace.jsonl")

    def kv(self, name: str) -> list[dict[str, Any]]:
        """The KV of each request that left the job's engine."""
        self[name]
        return harness.read_lines(self.folder / name / "kv.jsonl")

    def close(self) -> None:
        """Drop what has not started."""
        self._pool.shutdown(cancel_futures=True)


def need_engine() -> None:
    """Skip, or fail in CI, where there is no environment that runs engines."""
    if harness.ENGINE_PYTHON.exists() and harness.SECOND_PYTHON.exists():
        return
    message = "the engine environment is missing; next: scripts/engine_env (make test builds it)"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)


class Sites(dict[str, Path]):
    """Every supported SGLang from its wheel, patched by the product when it is asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, version: str) -> Path:
        wheel = wheel_of(version, harness.PROJECT / ".cache")
        self[version] = harness.patched_site(wheel, self._folder / version)
        return self[version]


@pytest.fixture(scope="session")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Sites:
    """The patched releases."""
    need_engine()
    return Sites(tmp_path_factory.mktemp("sites"))


@pytest.fixture(scope="session")
def site(sites: Sites) -> Path:
    """The release of the whole matrix."""
    return sites[harness.RELEASE]


@pytest.fixture(scope="session")
def engines(sites: Sites, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """All engines, queued at the first use."""
    engines = Engines(tmp_path_factory.mktemp("engines"))
    site = sites[harness.RELEASE]
    room = {
        "model_path": str(harness.text_target(tmp_path_factory.mktemp("target") / "target")),
        "skip_tokenizer_init": False,
        "context_length": scenarios.CONTEXT,
        "max_total_tokens": 4096,
        "max_running_requests": 8,
    }

    def trace(name: str) -> str:
        return str(engines.folder / name / "trace.jsonl")

    def ddtree(budget: int, **extra: Any) -> dict[str, Any]:
        return harness.engine_args("DDTREE", speculative_ddtree_budget=budget, **{**room, **extra})

    flows = [{"flow": flow} for flow in scenarios.FLOWS.values()]
    engines.start(
        "plain",
        site,
        harness.engine_args(None, **room),
        [*CALLS, *map(harness.alone, [*scenarios.FLOWS.values(), TIGHT])],
    )
    engines.start("dflash", site, harness.engine_args("DFLASH"), CALLS, DDTREE_TEST_CHAIN_TRACE=trace("dflash"))
    for budget in BUDGETS:
        name = f"budget-{budget}"
        engines.start(name, site, ddtree(budget), [*CALLS, *flows], SGLANG_DDTREE_TRACE=trace(name))
    engines.start(
        "chain",
        site,
        ddtree(harness.BLOCK_SIZE - 1, speculative_ddtree_topk_cap=1),
        CALLS,
        SGLANG_DDTREE_TRACE=trace("chain"),
    )
    seeded = ddtree(harness.BLOCK_SIZE - 1, speculative_ddtree_chain_seed=True)
    engines.start("chain-seed", site, seeded, CALLS, SGLANG_DDTREE_TRACE=trace("chain-seed"))
    engines.start("float16", site, ddtree(16, dtype="float16"), CALLS)
    engines.start("tight", site, ddtree(24, max_total_tokens=640, chunked_prefill_size=48), [{"flow": TIGHT}])
    engines.start("triton", site, ddtree(16), CALLS, **harness.TRITON)
    for version in harness.FIRST_WORKER[1:]:
        calls = [*CALLS, *({"flow": scenarios.wishing(scenarios.FLOWS[name])} for name in RELEASE_FLOWS)]
        engines.start(version, sites[version], ddtree(7, speculative_ddtree_budgets=scenarios.LANES), calls)
    # The newest one has another Triton backend.
    engines.start("triton-newest", sites[harness.FIRST_WORKER[-1]], ddtree(7), CALLS, **harness.TRITON)
    for name, (path, before, after) in BREAKS.items():
        copy = harness.broken_site(site, tmp_path_factory.mktemp(f"broken-{name}") / "site", path, before, after)
        engines.start(f"broken-{name}", copy, ddtree(16), CALLS)
    yield engines
    engines.close()
