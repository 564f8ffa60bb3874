# SPDX-License-Identifier: Apache-2.0
"""Every engine the tests need, two at a time: an engine takes about half a minute to start and decode."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.engine import harness

from ddtree_overlay.wheels import wheel_of


BUDGETS = (1, 3, 4, 7, 16)
#: Prompts of 7, 64 and 40 bytes.
ONE, THREE = harness.prompts(0), harness.prompts(0, 1, 3)
CALLS = [harness.greedy(ONE), harness.greedy(THREE)]

#: What a request can ask for that cuts a path or changes a node's logits. The context holds 256 tokens.
SCENARIOS = {
    "frequency penalty": harness.greedy(THREE, 24, frequency_penalty=1.5),
    "repetition penalty": harness.greedy(ONE, 24, repetition_penalty=1.8),
    "logit bias": harness.greedy(THREE, 24, logit_bias={"32": -4.0}),
    "stop token inside a path": harness.greedy(THREE, 40, ignore_eos=False, stop_token_ids=[46]),
    "end of the context": harness.greedy([(THREE[1] * 5)[:236]], 18),
    "one new token": harness.greedy(THREE, 1),
}

#: One piece of the overlay broken on purpose: file, what it holds, what it holds instead.
BREAKS = {
    "mask": (
        "tree.py",
        "torch.cat([ancestors.new_ones((width, prefix_len)), ancestors], dim=1)",
        "torch.cat([ancestors.new_ones((width, prefix_len)), torch.ones_like(ancestors).tril()], dim=1)",
    ),
    "positions": (
        "worker.py",
        "(batch.seq_lens.unsqueeze(1) + tree.depths)",
        "(batch.seq_lens.unsqueeze(1) + torch.arange(tree.depths.shape[1]))",
    ),
    # DFLASH's rule: the first rows instead of the path's.
    "commit": ("verify_input.py", "rows = path + ", "rows = steps + "),
}


class Engines:
    """Runs engine jobs by name and keeps their results."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pool = ThreadPoolExecutor(max_workers=2)
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

    def close(self) -> None:
        """Drop what has not started."""
        self._pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SGLang 0.5.11 from its wheel, patched by the product."""
    if not harness.ENGINE_PYTHON.exists():
        message = "the engine environment is missing; next: scripts/engine_env (make test builds it)"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    wheel = wheel_of(harness.RELEASE, harness.PROJECT / ".cache")
    return harness.patched_site(wheel, tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="session")
def engines(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """All engines, queued at the first use."""
    engines = Engines(tmp_path_factory.mktemp("engines"))

    def trace(name: str) -> str:
        return str(engines.folder / name / "trace.jsonl")

    def ddtree(budget: int, **extra: Any) -> dict[str, Any]:
        return harness.engine_args("DDTREE", speculative_ddtree_budget=budget, **extra)

    engines.start("plain", site, harness.engine_args(None), CALLS)
    engines.start("dflash", site, harness.engine_args("DFLASH"), CALLS, DDTREE_TEST_CHAIN_TRACE=trace("dflash"))
    for budget in BUDGETS:
        name = f"budget-{budget}"
        engines.start(name, site, ddtree(budget), CALLS, SGLANG_DDTREE_TRACE=trace(name))
    engines.start(
        "chain",
        site,
        ddtree(harness.BLOCK_SIZE - 1, speculative_ddtree_topk_cap=1),
        CALLS,
        SGLANG_DDTREE_TRACE=trace("chain"),
    )
    # A budget below the block: the draft is the wider of the two, also at the end of the context.
    engines.start("scenarios", site, ddtree(3), list(SCENARIOS.values()))
    engines.start("plain-scenarios", site, harness.engine_args(None), [*SCENARIOS.values(), harness.greedy(THREE, 48)])
    # Three requests and their steps do not fit: one is retracted and decoded again later.
    engines.start("retraction", site, ddtree(24, max_total_tokens=264), [harness.greedy(THREE, 48)])
    for name, (path, before, after) in BREAKS.items():
        copy = harness.broken_site(site, tmp_path_factory.mktemp(f"broken-{name}") / "site", path, before, after)
        engines.start(f"broken-{name}", copy, ddtree(16), CALLS)
    yield engines
    engines.close()
