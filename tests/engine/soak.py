# SPDX-License-Identifier: Apache-2.0
"""Random traffic in random engines against plain decoding: python -m tests.engine.soak [--scenarios N] [--seed S].

A scenario is a flow of requests; `PER_ENGINE` of them run one after the other in an engine drawn from the seed. Every
line names the seed that repeats it. Exits 1 when a greedy request got other tokens than plain decoding gives it.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engine import harness, scenarios

from ddtree_overlay.wheels import wheel_of


PER_ENGINE = 25


@dataclass(frozen=True)
class Group:
    """One engine and what it serves.

    Args:
        seed: All of it follows from this.
        engine: Arguments of the DDTREE engine.
        flows: The scenarios.
    """

    seed: int
    engine: dict[str, Any]
    flows: list[scenarios.Flow]


def draw_group(seed: int, size: int = PER_ENGINE) -> Group:
    """An engine and `size` scenarios."""
    draw = random.Random(seed)
    return Group(seed, scenarios.draw_engine(draw), [scenarios.draw_flow(draw) for _ in range(size)])


def run_group(site: Path, target: Path, group: Group, folder: Path) -> tuple[list[str], float]:
    """Decode a group with DDTREE and plainly: what differs, and the accept length over all its requests."""
    common = {"model_path": str(target), "skip_tokenizer_init": False, "context_length": scenarios.CONTEXT}
    plain = harness.decode(
        site,
        harness.engine_args(None, **common, max_total_tokens=4096, max_running_requests=8),
        [harness.alone(flow) for flow in group.flows],
        folder / f"{group.seed}-plain",
    )
    ours = harness.decode(
        site,
        harness.engine_args("DDTREE", **{**common, **group.engine}),
        [{"flow": flow} for flow in group.flows],
        folder / f"{group.seed}-ddtree",
    )
    found = [
        f"seed {group.seed}, scenario {at}: {problem}"
        for at, flow in enumerate(group.flows)
        for problem in scenarios.problems(flow, ours["calls"][at], plain["calls"][at])
    ]
    calls = ours["calls"]
    tokens = sum(len(ids) for call in calls for ids in call["output_ids"])
    steps = sum(spec.get("spec_verify_ct", 0) for call in calls for spec in call["spec"])
    return found, tokens / max(1, steps)


def main() -> int:
    """Run the groups until the scenarios are done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenarios", type=int, default=500)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 1_000_000 * 1000)
    parser.add_argument("--release", default=harness.RELEASE)
    options = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        wheel = wheel_of(options.release, harness.PROJECT / ".cache")
        site = harness.patched_site(wheel, folder / "site")
        target = harness.text_target(folder / "target")
        for done in range(0, options.scenarios, PER_ENGINE):
            group = draw_group(options.seed + done // PER_ENGINE, min(PER_ENGINE, options.scenarios - done))
            start = time.monotonic()
            try:
                found, accepted = run_group(site, target, group, folder)
            except harness.EngineError as error:
                found, accepted = [f"seed {group.seed}: the engine failed:\n{error}"], 0.0
            failed += bool(found)
            seconds = time.monotonic() - start
            verdict = "FAILED" if found else "ok"
            again = f"--seed {group.seed} --scenarios {len(group.flows)}"
            print(f"{verdict}  {again}  {accepted:.2f} tokens a step  {seconds:.0f} s  {group.engine}")  # noqa: T201
            print(*(f"  {line}" for line in found), sep="\n", end="" if not found else "\n", flush=True)  # noqa: T201
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
