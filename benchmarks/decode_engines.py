# SPDX-License-Identifier: Apache-2.0
"""The engines of `decode.py`: how they are started beside each other on one GPU, asked, and given up."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from gpu_proofs.engines import gpu_check


BENCHMARKS = Path(__file__).resolve().parent
PROJECT = BENCHMARKS.parent
#: Seconds that an answer is waited for, however little time is left.
LEAST = 1.0
#: Seconds that an engine which closed its channel has for ending.
MOMENT = 10


class EngineEndedError(RuntimeError):
    """An engine is gone or does not answer; the text is the end of its log.

    Args:
        engine: Its name.
        text: What happened.
    """

    def __init__(self, engine: str, text: str) -> None:
        super().__init__(text)
        self.engine = engine


class Engine:
    """One engine in a process of its own. It answers one request at a time, in the order asked.

    Args:
        name: Of its files in `workdir`; its log lies in the run's folder of logs.
        arguments: Of `sgl.Engine`.
        end: By the monotonic clock: no answer is waited for beyond it.
    """

    def __init__(
        self, options: argparse.Namespace, workdir: Path, name: str, arguments: dict[str, Any], end: float
    ) -> None:
        self.name, self.arguments, self.end = name, arguments, end
        self.log, self.stages = options.logs / f"{name}.log", workdir / f"{name}.stages"
        job = workdir / f"{name}.job"
        job.write_text(json.dumps({"engine": arguments}))
        ours, theirs = socket.socketpair()
        command = [options.python, str(BENCHMARKS / "decode_engine.py"), str(job), str(theirs.fileno())]
        clock = {"DECODE_CLOCK": str(workdir / f"{name}.clock"), "DDTREE_STAGES": str(self.stages)}
        if arguments.get("speculative_algorithm") == "DFLASH":
            clock["DECODE_DFLASH_STAGES"] = "1"
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                command,
                env=environment(options) | clock,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )
        theirs.close()
        self._channel, self._lines = ours, ours.makefile("r")
        self.asking = threading.RLock()
        self.ready: dict[str, Any] = {}

    def wait(self, seconds: float) -> None:
        """Wait until the engine has started."""
        self.ready = self._answer(seconds)

    def ask(self, request: dict[str, Any], seconds: float = 120) -> dict[str, Any]:
        """The answer to one request.

        Raises:
            EngineEndedError: There is none within `seconds`.
        """
        with self.asking:
            # An engine that is gone does not take the request; waiting for its answer says so.
            with contextlib.suppress(OSError):
                self._channel.settimeout(5)
                self._channel.sendall(json.dumps(request).encode() + b"\n")
            return self._answer(seconds)

    def _answer(self, seconds: float) -> dict[str, Any]:
        self._channel.settimeout(max(min(seconds, self.end - time.monotonic()), LEAST))
        closed = False
        try:
            line = self._lines.readline()
            closed = not line
        except OSError:
            line = ""
        if not line:
            state = "gave no answer in time" if self.alive(closed) else f"ended with {self.process.returncode}"
            text = self.log.read_text(errors="replace")[-3000:]
            raise EngineEndedError(self.name, f"engine {self.name} {state}; the end of its log:\n{text}")
        return json.loads(line)

    def alive(self, closed: bool) -> bool:
        """Whether its first process runs; one that has `closed` its channel has a moment to end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(MOMENT if closed else 0)
        return self.process.returncode is None

    def close(self) -> None:
        """End the engine with everything that it started; it has nothing to lose."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    # What `gpu_proofs.judging` asks of an arm.

    kept: dict[str, Any]

    def result(self) -> dict[str, Any]:
        """What the calls of `decode` gave."""
        return self.kept["result"]

    def decode(self, calls: list[dict[str, Any]]) -> None:
        """Run calls of `scripts/engine_job` for a later comparison."""
        self.kept = {"result": {"calls": self.more(calls)}}

    def more(self, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Further calls."""
        return [self.ask({"call": call}) for call in calls]


def environment(options: argparse.Namespace) -> dict[str, str]:
    """Of an engine: the site, the clock, no network."""
    clock = str(BENCHMARKS / "step_clock")
    if options.cpu:
        paths = f"{clock}:{PROJECT / 'tests/engine/standins'}:{options.site}"
        small = {"SGLANG_USE_CPU_ENGINE": "1", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        small |= {"DDTREE_TEST_KEEP_DTYPE": "1", "DDTREE_TEST_REFERENCE_KERNELS": "1", "DDTREE_TEST_ANY_DEVICE": "1"}
        return os.environ | small | {"TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths}
    given = gpu_check.environment(options)
    few = {"TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "4"}
    return given | few | {"PYTHONPATH": f"{clock}:{given['PYTHONPATH']}"}


class Started:
    """All engines of a run, started at once and closed together.

    Args:
        jobs: Arguments of each engine by its name.
        end: By the monotonic clock: when the run has to be over.
    """

    def __init__(self, options: argparse.Namespace, workdir: Path, jobs: dict[str, dict[str, Any]], end: float) -> None:
        self.engines: dict[str, Engine] = {}
        self._jobs, self._options, self._workdir, self._end = jobs, options, workdir, end

    def __enter__(self) -> Started:
        self._options.logs.mkdir(parents=True, exist_ok=True)
        for name, arguments in self._jobs.items():
            self.engines[name] = Engine(self._options, self._workdir, name, arguments, self._end)
        return self

    def wait(self, seconds: float) -> list[EngineEndedError]:
        """Until every engine is ready or failed: the failures; their engines are given up."""
        end, failures = time.monotonic() + seconds, []
        for name, engine in list(self.engines.items()):
            try:
                engine.wait(end - time.monotonic())
                print(f"engine {name}: ready after {engine.ready['start_s']:.0f} s", flush=True)
            except EngineEndedError as failure:
                failures.append(failure)
                self.give_up(failure)
        return failures

    def give_up(self, failure: EngineEndedError) -> None:
        """End an engine that is gone or hangs."""
        engine = self.engines.pop(failure.engine, None)
        if engine is not None:
            engine.close()

    def __exit__(self, *_: object) -> None:
        for engine in self.engines.values():
            engine.close()
