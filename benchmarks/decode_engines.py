# SPDX-License-Identifier: Apache-2.0
"""The engines of `decode.py`: how they are started beside each other on one GPU, and how they are asked."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from gpu_proofs.engines import gpu_check


BENCHMARKS = Path(__file__).resolve().parent
PROJECT = BENCHMARKS.parent
#: Rendezvous ports lie below the range from which a kernel gives ports away.
FIRST_PORT = 20500


class EngineEndedError(RuntimeError):
    """An engine is gone or does not answer; the text is the end of its log."""


class Engine:
    """One engine in a process of its own. It answers one request at a time, in the order asked.

    Args:
        name: Of its files in `workdir`.
        arguments: Of `sgl.Engine`.
    """

    def __init__(self, options: argparse.Namespace, workdir: Path, name: str, arguments: dict[str, Any]) -> None:
        self.name, self.arguments = name, arguments
        self.log, self.stages = workdir / f"{name}.log", workdir / f"{name}.stages"
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
            self._channel.sendall(json.dumps(request).encode() + b"\n")
            return self._answer(seconds)

    def _answer(self, seconds: float) -> dict[str, Any]:
        self._channel.settimeout(max(seconds, 1))
        try:
            line = self._lines.readline()
        except TimeoutError:
            line = ""
        if not line:
            state = "gave no answer in time" if self.process.poll() is None else f"ended with {self.process.poll()}"
            text = self.log.read_text(errors="replace")[-4000:]
            raise EngineEndedError(f"the engine {self.name} {state}; the end of its log:\n{text}")
        return json.loads(line)

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


@dataclass(frozen=True)
class Arm:
    """One way to decode: an engine, and the budget that its requests ask for."""

    name: str
    engine: str
    budget: int | str | None = None

    def rows(self, block: int) -> int:
        """Rows that the target verifies per request and step, as far as the arm decides it."""
        return self.budget + 1 if isinstance(self.budget, int) else block


class Bench:
    """What a run starts: engine arguments by name, and the arms that they serve.

    Lanes of a default `auto` are not captured for every batch size. The budgets of --more come from an engine of their
    own, which takes no more than 8 requests, so that wide trees do not size everything for large batches.
    """

    def __init__(self, options: argparse.Namespace, pair: Path) -> None:
        self.options, self.pair = options, pair
        draft = json.loads((pair / "draft/config.json").read_text())
        self.block = int(draft.get("block_size") or draft["dflash_config"]["block_size"])
        self.engines: dict[str, dict[str, Any]] = {}
        self.arms: list[Arm] = []
        self._add("plain", "plain")
        self._add("DFLASH", "dflash", self._drafting("DFLASH"))
        trees = self._drafting("DDTREE")
        budgets = [int(text) for text in options.budgets.split(",") if text]
        if not self.has_lanes():
            for budget in budgets or [16, 64]:
                self._add(f"DDTREE {budget}", f"ddtree-{budget}", trees | {"speculative_ddtree_budget": budget})
            return
        lanes = trees | {"speculative_ddtree_budget": "auto"}
        if budgets:
            lanes["speculative_ddtree_budgets"] = sorted({*budgets, self.block - 1})
        self._add("DDTREE auto", "ddtree", lanes)
        more = [int(text) for text in options.more.split(",") if text]
        if more:
            sizes = [size for size in concurrencies(options) if size <= 8]
            few = engine_arguments(options, pair, sizes) | trees
            self.engines["ddtree-more"] = few | {
                "speculative_ddtree_budget": max(more),
                "speculative_ddtree_budgets": more,
            }
        if options.without_calibration:
            self._add("DDTREE auto, uncalibrated", "uncalibrated", lanes | {"speculative_ddtree_calibration": "off"})

    def _add(self, arm: str, engine: str, extra: dict[str, Any] | None = None) -> None:
        self.engines[engine] = engine_arguments(self.options, self.pair, concurrencies(self.options)) | (extra or {})
        self.arms.append(Arm(arm, engine))

    def add_budgets(self, started: dict[str, Engine]) -> None:
        """An arm for every budget that a started engine says it has captured, and the chain."""
        kinds = {"ddtree": ("chain",), "ddtree-more": (), "uncalibrated": ("chain",)}
        for name, others in kinds.items():
            if name not in started:
                continue
            listed = started[name].ready["info"]["speculative_ddtree_budgets"]
            found = [int(text) for text in listed.split(",")] if isinstance(listed, str) else listed
            if name == "uncalibrated":
                found = [budget for budget in found if budget in (self.block - 1, 64)]
            end = ", uncalibrated" if name == "uncalibrated" else ""
            self.arms += [Arm(f"DDTREE {budget}{end}", name, budget) for budget in (*others, *found)]

    def _drafting(self, algorithm: str) -> dict[str, Any]:
        return {
            "speculative_algorithm": algorithm,
            "speculative_draft_model_path": str(self.pair / "draft"),
            "attention_backend": "triton",
        }

    def has_lanes(self) -> bool:
        """Whether the patched site serves several budgets from one engine."""
        return "speculative_ddtree_budgets" in (self.options.site / "sglang/srt/server_args.py").read_text()


def engine_arguments(options: argparse.Namespace, pair: Path, sizes: list[int]) -> dict[str, Any]:
    """Arguments that all engines share; `sizes` are the batch sizes that get graphs.

    SGLang sizes its pool by what is free before and after the model is loaded, while other engines take memory as well.
    With a fraction near 1 that estimate stays large, and `max_total_tokens` decides.
    """
    second = (options.site / "sglang/srt/speculative/dflash_worker_v2.py").exists()
    shared: dict[str, Any] = {
        "model_path": str(pair / "target"),
        "skip_tokenizer_init": True,
        "attention_backend": "torch_native" if options.cpu else "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_overlap_schedule": not second,
        "disable_radix_cache": True,
        "sleep_on_idle": True,  # an engine that waits leaves its core to the others
        "max_running_requests": sizes[-1],
        "random_seed": 0,
        "nccl_port": free_port(),
        "log_level": "info",
    }
    if options.cpu:
        small = {"max_total_tokens": 4096, "context_length": 256, "mem_fraction_static": 0.5}
        return shared | small | {"device": "cpu", "dtype": "float32", "disable_cuda_graph": True}
    graphs: dict[str, Any] = {"disable_piecewise_cuda_graph": True, "cuda_graph_bs": sizes}
    if second:
        graphs = {"disable_prefill_cuda_graph": True, "cuda_graph_bs_decode": sizes}
    room = {
        "dtype": "bfloat16",
        "mem_fraction_static": 0.95,
        "context_length": 2048,
        # Prompt, the most output, and two steps of a wide tree.
        "max_total_tokens": max(sizes[-1], 16) * (options.prompt_tokens + 6 * options.tokens + 300),
    }
    return shared | graphs | room


def concurrencies(options: argparse.Namespace) -> list[int]:
    """Of the run, ascending."""
    return sorted(int(text) for text in options.concurrency.split(","))


_ports = iter(range(FIRST_PORT, FIRST_PORT + 500))


def free_port() -> int:
    """A port of its own for an engine."""
    for port in _ports:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
    raise EngineEndedError(f"no free port among {FIRST_PORT} to {FIRST_PORT + 499}")


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
    """All engines of a run, started at once and closed together."""

    def __init__(self, options: argparse.Namespace, workdir: Path, jobs: dict[str, dict[str, Any]]) -> None:
        self.engines: dict[str, Engine] = {}
        self.failed: dict[str, str] = {}
        self._jobs, self._options, self._workdir = jobs, options, workdir

    def __enter__(self) -> Started:
        for name, arguments in self._jobs.items():
            self.engines[name] = Engine(self._options, self._workdir, name, arguments)
        return self

    def wait(self, seconds: float) -> None:
        """Until every engine is ready or failed; one that failed is left out and its log's end is kept."""
        end = time.monotonic() + seconds
        for name, engine in list(self.engines.items()):
            try:
                engine.wait(end - time.monotonic())
                print(f"engine {name}: ready after {engine.ready['start_s']:.0f} s", flush=True)
            except EngineEndedError as failure:
                self.failed[name] = str(failure)
                print(failure, flush=True)
                engine.close()
                del self.engines[name]

    def __exit__(self, *_: object) -> None:
        for engine in self.engines.values():
            engine.close()
