# SPDX-License-Identifier: Apache-2.0
"""What a run of `decode.py` has found so far, and the time that is left to it."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import decode_figures
from decode_arms import FURTHER, Arm
from decode_engines import EngineEndedError, Started
from decode_plan import PLAIN_SHARE, Plan


#: Seconds that an engine may take beyond what it was asked to measure before it counts as hung.
PATIENCE = 25


class Run:
    """A run of all arms.

    Args:
        options: Of the command line.
        start: When the run began, by the monotonic clock.
    """

    def __init__(self, options: argparse.Namespace, start: float) -> None:
        self.options, self.end = options, start + options.limit
        self.start = start
        self.prompts = [p[: options.prompt_tokens] for p in json.loads((options.pair / "prompts.json").read_text())]
        self.count = 0
        self.plan = Plan(options)
        self.result: dict[str, Any] = {
            "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "definitions": decode_figures.DEFINITIONS,
            "rounds": options.rounds,
            "block": 0,
            "arms": [],
            "engines": {},
            "measurements": [],
            "stages": [],
            "plan": [],
            "failed": {},
            "dropped": [],
            "phases": {},
        }

    def left(self) -> float:
        """Seconds before the run has to end."""
        return self.end - time.monotonic()

    def say(self, text: str) -> None:
        """A line of progress, with the seconds since the start."""
        print(f"[{time.monotonic() - self.start:4.0f} s] {text}", flush=True)

    def phase(self, name: str) -> None:
        """Note how many seconds the run has taken up to here."""
        self.result["phases"][name] = round(time.monotonic() - self.start, 1)
        self.say(name)
        self.save()

    def save(self) -> None:
        """Write all that is known; all of it or nothing. Figures that cannot be made do not cost the measurements."""
        try:
            self.result["figures"] = decode_figures.figures(self.result)
        except Exception:
            self.result["figures"] = decode_figures.NOTHING
            self.drop(f"figures: {traceback.format_exc().strip().splitlines()[-1]}")
        draft = self.options.out.with_suffix(".draft")
        draft.write_text(json.dumps(self.result, default=str))
        draft.rename(self.options.out)

    def measure(
        self, started: Started, arm: Arm, size: int, number: int, share: float = 1, **changes: Any
    ) -> dict[str, Any] | None:
        """One measurement with the number-th batch of prompts: its window, None when no step held all requests.

        It takes a `share` of the time of a measurement. `changes` go into the engine's request.

        Raises:
            EngineEndedError: The engine is gone or hangs.
        """
        self.count += 1
        most = self.options.seconds * (PLAIN_SHARE if arm.name == "plain" else 1)
        asked = {
            "measure": f"m{self.count}",
            "prompts": [self.prompts[(number * size + i) % len(self.prompts)] for i in range(size)],
            "tokens": self.options.tokens,
            "most": FURTHER * self.options.tokens,
            "seconds": most * share + self.plan.prefill[size],
            "budget": arm.budget,
        } | changes
        answer = started.engines[arm.engine].ask(asked, asked["seconds"] + PATIENCE)
        self.result.setdefault("memory", {})[arm.engine] = answer["memory"]
        found = decode_figures.window(answer["steps"], size, self.options.tokens)
        if found is None:
            errors = "".join(f", {error}" for error in answer["errors"])
            most = max((len(step[2]) for step in answer["steps"]), default=0)
            seen = f"{len(answer['steps'])} steps of {most} requests at most in {asked['seconds']:.1f} s"
            self.drop(f"{arm.name} at concurrency {size}: no whole step among {seen}{errors}")
        return found

    def lost(self, started: Started, failure: EngineEndedError) -> None:
        """Go on without an engine; at the end of the time it is not the engine's fault."""
        started.give_up(failure)
        if self.left() > 1:
            what, _, log = str(failure).partition("\n")
            self.result["failed"][failure.engine] = {"what": what, "log": log[-1500:]}
            print(failure, flush=True)
        else:
            self.drop(f"what was asked of {failure.engine} when the time was over")
        self.save()

    def drop(self, note: str) -> None:
        """Say once what is missing."""
        if note not in self.result["dropped"]:
            self.result["dropped"].append(note)
