# SPDX-License-Identifier: Apache-2.0
"""Does a padded pair say what the pair itself says? By the rule of `scripts/gpu_prove` and the unpadded target."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from decode_engines import Started
from gpu_proofs import judging
from gpu_proofs.calls import greedy


class Verdicts:
    """What `judging.judge` asks of a part of `gpu_prove`."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}

    def check(self, name: str, passed: bool | None, figures: str) -> None:
        """A row."""
        self.rows.append({"check": name, "passed": passed, "figures": figures})
        print(f"  {'ok' if passed else 'FAILED'}: {name}: {figures}", flush=True)

    def done(self, arm: Any) -> Any:
        """The texts of an engine."""
        return arm.result()


def compare_texts(started: Started, prompts: list[list[int]], *, small: bool) -> dict[str, Any]:
    """Decode the same prompts with the unpadded target and with padded engines, and judge each first difference.

    Raises:
        EngineEndedError: One of the engines is gone.
    """
    prompts, tokens = prompts[: 4 if small else 8], 8 if small else 48
    sizes = sorted({1, min(4, len(prompts)), len(prompts)})
    calls = [greedy(prompts[:size], tokens) for size in sizes]
    plain = started.engines["unpadded"]
    names = ("plain", "dflash", "ddtree")
    padded = {f"padded {name}": started.engines[name] for name in names if name in started.engines}
    with ThreadPoolExecutor() as threads:
        first = threads.submit(plain.decode, [call | {"tops": 2} for call in calls])
        others = [threads.submit(engine.decode, calls) for engine in padded.values()]
    for done in (first, *others):
        done.result()
    verdicts = Verdicts()
    judging.judge(verdicts, plain, padded)  # type: ignore[arg-type]
    equal = {}
    for name, engine in padded.items():
        found, compared = judging.differences(plain.result(), engine.result())
        equal[name] = [compared - len(found), compared]
    return {"checks": verdicts.rows, "equal": equal, "facts": verdicts.facts}
