# SPDX-License-Identifier: Apache-2.0
"""Engines that run beside each other on one GPU, and the checks of a part of `gpu_prove`."""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.machinery
import importlib.util
import itertools
import json
import os
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any


PROJECT = Path(__file__).resolve().parents[2]
SCRIPTS = PROJECT / "scripts"
#: Rendezvous ports lie below the range from which a kernel gives ports away: an engine takes its own a minute late.
#: Two runs beside each other begin at ports of their own; the kernel hands out those above 32767 by itself.
FIRST_PORT = 20100 + os.getpid() % 120 * 100


def sibling(name: str) -> Any:
    """A script without a suffix as a module."""
    loader = importlib.machinery.SourceFileLoader(name, str(SCRIPTS / name))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    loader.exec_module(module)
    return module


gpu_check = sibling("gpu_check")


class Machine:
    """What all parts of a run share: the time that is left, room for `--at-once` busy engines, engines by their job."""

    def __init__(self, options: argparse.Namespace, workdir: Path) -> None:
        self.options, self.workdir = options, workdir
        self.start = time.monotonic()
        self.end = self.start + options.limit
        self.room = threading.Semaphore(options.at_once)
        self.threads = ThreadPoolExecutor(max_workers=200)
        self.lock = threading.Lock()
        self.arms: dict[str, Arm] = {}
        self.parts: list[Part] = []
        self.ports = itertools.count(FIRST_PORT)

    def left(self) -> float:
        """Seconds before everything has to end."""
        return self.end - time.monotonic()

    def stop(self) -> None:
        """The time is over now: whatever is not done is not run."""
        self.end = min(self.end, time.monotonic())

    def port(self) -> int:
        """A port of its own for an engine."""
        for port in self.ports:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)):
                    return port
        raise AssertionError

    def say(self, text: str) -> None:
        """A line of progress, with the seconds since the start."""
        print(f"  {time.monotonic() - self.start:4.0f} s  {text}", flush=True)

    def save(self) -> None:
        """Write every row and fact of all parts to --out, after each check: a run that is cut keeps what it has."""
        out: Path | None = getattr(self.options, "out", None)
        if out:
            with self.lock:
                rows = [row for part in self.parts for row in part.rows]
                facts = {part.name: dict(part.facts) for part in self.parts}
                draft = out.with_name(out.name + ".draft")
                names = [part.name for part in self.parts]
                draft.write_text(json.dumps({"parts": names, "rows": rows, "facts": facts}, default=str))
                draft.rename(out)

    def close(self) -> None:
        """Let the engines go that wait for further calls, and end what still runs."""
        for arm in self.arms.values():
            arm.dismiss()
        patience = time.monotonic() + 15
        for arm in self.arms.values():
            while arm.alive() and arm.stays and time.monotonic() < patience:
                time.sleep(0.1)
            arm.kill()
        self.threads.shutdown(wait=True)


class Arm:
    """One engine: its calls run as soon as there is room; one that stays answers further calls until dismissed."""

    def __init__(
        self, machine: Machine, name: str, job: dict[str, Any], wrapper: list[str], env: dict[str, str]
    ) -> None:
        self.machine, self.name, self.stays = machine, name, job["stays"]
        files = (machine.workdir / f"{name}.{kind}" for kind in ("job", "json", "log"))
        self.job, self.answer, self.log = files
        self.job.write_text(json.dumps(job))
        command = [machine.options.python, str(SCRIPTS / "engine_job"), str(self.job), str(self.answer)]
        self.command, self.env = wrapper + command, env
        self.process: subprocess.Popen[bytes] | None = None
        self.rounds = itertools.count(1)
        self.asking = threading.RLock()
        self.kept: dict[str, Any] = {}  # what was found out with `more`, for parts that share the arm
        self.first: Future[dict[str, Any] | None] = machine.threads.submit(self.run)
        self.ended = "not run"

    def run(self) -> dict[str, Any] | None:
        """Start the engine and wait for its first result; it gives its room away then."""
        with self.machine.room:
            if self.machine.left() < self.machine.options.judging + 20:
                self.ended = "no time left"
                return None
            start = time.monotonic()
            with self.log.open("wb") as out:
                self.process = subprocess.Popen(
                    self.command, env=self.env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
                )
            found = self.wait_for(self.answer, ends=not self.stays, reserve=self.machine.options.judging)
            how = "" if found else f", {self.ended}"
            self.machine.say(f"engine {self.name}: {time.monotonic() - start:.0f} s{how}")
            return found

    def wait_for(self, file: Path, *, ends: bool, reserve: float = 0) -> dict[str, Any] | None:
        """The JSON that the engine writes to `file`, `reserve` seconds before the end; with `ends` it has to end."""
        assert self.process
        while self.machine.left() > reserve:
            code = self.process.poll()
            if file.exists() and not (ends and code is None):
                self.ended = str(code)
                return json.loads(file.read_text()) | {"returncode": code}
            if code is not None:
                self.ended = f"ended with {code}"
                self.kill()
                return None
            time.sleep(0.2)
        self.ended = "no time left"
        self.kill()
        return None

    def result(self) -> dict[str, Any] | None:
        """What the first calls gave; None when the engine failed or the time is over."""
        return self.first.result()

    def more(self, calls: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
        """Further calls of an engine that stays."""
        with self.asking:
            if not calls or not self.result():
                return [] if not calls else None
            count = next(self.rounds)
            self.ask(count, calls)
            found = self.wait_for(self.answer.with_suffix(f".answer-{count}"), ends=False)
            return found["calls"] if found else None

    def ask(self, count: int, calls: list[dict[str, Any]]) -> None:
        """Lay calls where the engine looks for them."""
        draft = self.answer.with_suffix(".draft")
        draft.write_text(json.dumps(calls))
        draft.rename(self.answer.with_suffix(f".calls-{count}"))

    def alive(self) -> bool:
        """Whether the engine runs."""
        return self.process is not None and self.process.poll() is None

    def dismiss(self) -> None:
        """No further calls."""
        if self.stays and self.alive():
            self.ask(next(self.rounds), [])

    def kill(self) -> None:
        """End the engine with everything that it started."""
        if self.process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Part:
    """A part of the run: its engines' arguments, and its checks as rows of the table."""

    def __init__(self, machine: Machine, name: str) -> None:
        self.machine, self.name, self.options = machine, name, copy.copy(machine.options)
        self.rows: list[dict[str, str]] = []
        self.facts: dict[str, Any] = {}
        machine.parts.append(self)

    def check(self, name: str, passed: bool | None, figures: str) -> None:
        """A row of the table; None: not run."""
        word = "not run" if passed is None else "ok" if passed else "FAILED"
        self.rows.append({"part": self.name, "check": name, "result": word, "figures": figures})
        self.machine.say(f"{word:8} {self.name}: {name}: {figures}")
        self.machine.save()

    def engine(
        self,
        name: str,
        calls: list[dict[str, Any]],
        *,
        watched: bool = False,
        ranked: bool = False,
        variables: dict[str, str] | None = None,
        stays: bool = False,
        wrapper: list[str] | None = None,
        **extra: Any,
    ) -> Arm:
        """Start an engine at once (`extra`: arguments beside the shared ones); ask `done` for its result.

        `variables` name files of the working folder that `gpu_watch` writes. A job that another part has started
        already, with the same engine arguments and calls, is not started again.
        """
        name = f"{self.name}-{name}"
        job = {"engine": self.arguments() | extra, "calls": calls, "stays": stays}
        env = self.environment()
        if extra.get("dtype") == "float16":
            env |= {"SGLANG_MAMBA_CONV_DTYPE": "float16"}  # SGLang keeps convolution windows in bfloat16 otherwise
        if watched:
            env |= {"DDTREE_WATCH": str(self.machine.workdir / f"{name}.watch")}
            env["PYTHONPATH"] = f"{SCRIPTS / 'gpu_watch'}:{env['PYTHONPATH']}"
        if ranked:
            env |= {"DDTREE_RANKS": str(self.machine.workdir / f"{name}.ranks")}
            env["PYTHONPATH"] = f"{SCRIPTS / 'gpu_watch'}:{env['PYTHONPATH']}"
        if self.options.cpu and extra.get("tp_size"):
            # A CPU's ranks draw for themselves otherwise, and share their threads.
            env |= {"SYNC_TOKEN_IDS_ACROSS_TP": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
        if variables:
            env |= {name: str(self.machine.workdir / file) for name, file in variables.items()}
            env["PYTHONPATH"] = f"{SCRIPTS / 'gpu_watch'}:{env['PYTHONPATH']}"
        key = json.dumps([job, watched, ranked, variables, wrapper], sort_keys=True)
        with self.machine.lock:
            if key not in self.machine.arms:
                if not self.options.cpu:
                    job["engine"]["nccl_port"] = self.machine.port()
                self.machine.arms[key] = Arm(self.machine, name, job, wrapper or [], env)
            return self.machine.arms[key]

    def command(self, command: list[str], log: Path, **environment: str) -> int | None:
        """Run a command that is no engine, its output in `log`: its exit code, or None when the time is over."""
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                env=self.environment() | environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        while self.machine.left() > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(0.2)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None

    def done(self, arm: Arm) -> dict[str, Any] | None:
        """The result of an engine; a failed check, or one that was not run, when there is none."""
        result = arm.result()
        if not result:
            if arm.ended != "no time left":
                print(arm.log.read_text(errors="replace")[-3000:], flush=True)
            self.check(f"{arm.name}: engine runs", None if arm.ended == "no time left" else False, arm.ended)
        return result

    def watched(self, arm: Arm) -> list[dict[str, Any]]:
        """The steps of a watched engine."""
        return self.lines(f"{arm.name}.watch")

    def ranked(self, arm: Arm) -> list[dict[str, Any]]:
        """The hashes of all ranks of an engine that was started with `ranked`."""
        return self.lines(f"{arm.name}.ranks")

    def lines(self, name: str) -> list[dict[str, Any]]:
        """What an engine has written to a file of JSON lines."""
        file = self.machine.workdir / name
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def environment(self) -> dict[str, str]:
        """Of an engine: strict counts of KV slots after every step, and at every pause."""
        strict = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1"}
        if self.options.cpu:
            strict |= {"TRITON_INTERPRET": "1", "SGLANG_USE_CPU_ENGINE": "1", "DDTREE_TEST_KEEP_DTYPE": "1"}
            strict |= {"DDTREE_TEST_REFERENCE_KERNELS": "1", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
            strict |= {"DDTREE_TEST_ANY_DEVICE": "1"} if self.second_worker() else {}
            paths = f"{PROJECT / 'tests/engine/standins'}:{self.options.site}"
            return os.environ | strict | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
        # A dozen engines compile side by side: none of them may take all cores.
        few = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "2"}
        return gpu_check.environment(self.options) | strict | few

    def arguments(self) -> dict[str, Any]:
        """Engine arguments that all arms share.

        SGLang sizes its pool by what was free before and after the model was loaded; other engines take memory in
        between. With a fraction near 1 the estimate stays large whatever they take, and `max_total_tokens` decides.
        """
        shared = {
            "model_path": str(self.options.pair / "target"),
            "skip_tokenizer_init": True,
            "attention_backend": "triton",
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "disable_overlap_schedule": not self.second_worker(),
            "sleep_on_idle": True,  # an engine that waits leaves its core to the others
            "mem_fraction_static": 0.5 if self.options.cpu else 0.9,
            "random_seed": 0,
            "log_level": "info",
        }
        if self.options.cpu:
            small = {"max_running_requests": 4, "max_total_tokens": 1024, "context_length": 256}
            return shared | small | {"device": "cpu", "dtype": "float32", "disable_cuda_graph": True}
        graphs: dict[str, Any] = {"disable_piecewise_cuda_graph": True, "cuda_graph_max_bs": 16}
        if self.second_worker():
            graphs = {"disable_prefill_cuda_graph": True, "cuda_graph_max_bs_decode": 16}
        return (
            shared
            | graphs
            | {
                "dtype": "bfloat16",
                "max_running_requests": 16,
                "context_length": 1024,
                "max_total_tokens": 16384,
            }
        )

    def second_worker(self) -> bool:
        """Whether the site's SGLang has the second generation of DFLASH workers, which schedule ahead."""
        return (self.options.site / "sglang/srt/speculative/dflash_worker_v2.py").exists()

    def drafting(self, algorithm: str, budget: int | None = None) -> dict[str, Any]:
        """Engine arguments of a speculative arm; without `budget` a tree has --budget nodes."""
        extra = {"speculative_ddtree_budget": budget or self.options.budget} if algorithm == "DDTREE" else {}
        return gpu_check.drafting(self.options, algorithm) | extra
