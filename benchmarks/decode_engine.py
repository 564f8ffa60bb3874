#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One SGLang engine that measures what it is asked to: decode_engine.py JOB.json FD. Started by `decode.py`.

The job: {"engine": {arguments of sgl.Engine}}. Requests and answers are JSON lines over the socket FD; the first answer
says that the engine is ready. A request is {"call": a batch of `scripts/engine_job`}, {"info": true} or

    {"measure": NAME, "prompts": [[ids], ...], "tokens": N, "most": M, "seconds": S, "budget": number, "chain" or null}

which starts all prompts at once and aborts them when each of them has N tokens behind its first decode step, or after S
seconds; until then all go on, to M tokens at most. The answer holds the steps as `step_clock` saw them, errors,
and the peak of the engine's memory.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.machinery
import importlib.util
import json
import os
import socket
import time
from pathlib import Path
from typing import Any


ENGINE_JOB = Path(__file__).resolve().parents[1] / "scripts/engine_job"
#: Seconds to wait for the last record of a measurement.
PATIENCE = 2.0


def main(job_file: str, descriptor: str) -> None:
    """Start the engine and answer until nobody asks any more."""
    import sglang as sgl

    channel = socket.socket(fileno=int(descriptor))
    job = json.loads(Path(job_file).read_text())
    start = time.perf_counter()
    engine = sgl.Engine(**job["engine"])
    send(channel, {"start_s": time.perf_counter() - start, "info": info(engine)})
    clock = Clock(Path(os.environ["DECODE_CLOCK"]))
    with channel.makefile("r") as lines:
        for line in lines:
            send(channel, answer(engine, clock, json.loads(line)))
    engine.shutdown()


def send(channel: socket.socket, message: dict[str, Any]) -> None:
    """One line."""
    channel.sendall(json.dumps(message, default=str).encode() + b"\n")


def info(engine: Any) -> dict[str, Any]:
    """What the server says of itself, as far as JSON can hold it."""
    given = engine.get_server_info()
    state = given.pop("internal_states")[0]
    kept = ("speculative_", "attention_backend", "version", "cuda_graph", "max_total", "ddtree", "disable_", "memory")
    return {key: value for key, value in {**state, **given}.items() if key.startswith(kept)}


def answer(engine: Any, clock: Clock, asked: dict[str, Any]) -> dict[str, Any]:
    """One request answered."""
    if "call" in asked:
        loader = importlib.machinery.SourceFileLoader("engine_job", str(ENGINE_JOB))
        module = importlib.util.module_from_spec(importlib.util.spec_from_loader("engine_job", loader))
        loader.exec_module(module)
        return module.run_call(engine, asked["call"])
    if "measure" in asked:
        errors = engine.loop.run_until_complete(measure(engine, clock, asked))
        return {"steps": clock.steps(asked["measure"]), "memory": clock.memory, "errors": errors}
    return info(engine)


async def measure(engine: Any, clock: Clock, asked: dict[str, Any]) -> list[str]:
    """All prompts at once until each has its tokens or the time is over; what went wrong with some of them."""
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": asked["most"], "ignore_eos": True}
    if asked.get("budget") is not None:
        sampling["custom_params"] = {"ddtree_budget": asked["budget"]}
    rids = [f"{asked['measure']}/{asked['tokens']}/{number}" for number in range(len(asked["prompts"]))]
    tasks = [
        asyncio.ensure_future(engine.async_generate(input_ids=prompt, sampling_params=sampling, rid=rid))
        for prompt, rid in zip(asked["prompts"], rids, strict=True)
    ]
    end = time.monotonic() + asked["seconds"]
    while time.monotonic() < end and not clock.has(asked["measure"]):
        done, _ = await asyncio.wait(tasks, timeout=0.004, return_when=asyncio.FIRST_COMPLETED)
        if done:
            break
    for task, rid in zip(tasks, rids, strict=True):
        if not task.done():
            engine.tokenizer_manager.abort_request(rid)
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    return sorted({f"{type(end).__name__}: {end}" for end in ended if isinstance(end, Exception)})


class Clock:
    """Reads what `step_clock` writes."""

    def __init__(self, file: Path) -> None:
        self._file, self._at = file, 0
        self._found: list[list[Any]] = []
        self.memory: dict[str, int] = {}

    def has(self, name: str) -> bool:
        """Whether steps of a measurement are written yet."""
        self._read()
        return any(step[0].startswith(f"{name}/") for step in self._found)

    def steps(self, name: str) -> list[list[Any]]:
        """The steps of a measurement, [time, kind, tokens of each request, finished], once its last one is written."""
        patience = time.monotonic() + PATIENCE
        while time.monotonic() < patience:
            self._read()
            steps = [step[1:] for step in self._found if step[0].startswith(f"{name}/")]
            if steps and steps[-1][3] == len(steps[-1][2]):
                break
            time.sleep(0.004)
        self._found.clear()
        return steps

    def _read(self) -> None:
        if not self._file.exists():
            return
        with self._file.open() as source:
            source.seek(self._at)
            text = source.read()
        whole = text[: text.rfind("\n") + 1]
        self._at += len(whole)
        for record in map(json.loads, whole.splitlines()):
            if isinstance(record, dict):
                self.memory = record
            else:
                self._found.append(record)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", metavar="JOB.json")
    parser.add_argument("descriptor", metavar="FD")
    options = parser.parse_args()
    main(options.job, options.descriptor)
