# SPDX-License-Identifier: Apache-2.0
"""A part of a run of `gpu_prove`: the engines that it asks for, and its checks as rows of the table."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

from gpu_proofs.engines import PROJECT, SCRIPTS, Arm, Machine, gpu_check


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
