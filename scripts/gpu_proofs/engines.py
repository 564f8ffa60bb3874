# SPDX-License-Identifier: Apache-2.0
"""Engines that run beside each other on one GPU."""

from __future__ import annotations

import argparse
import contextlib
import importlib.machinery
import importlib.util
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from gpu_proofs.checks import Part

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


def version(site: Path) -> str:
    """The release of a site, by its metadata; the folder's name where there is none."""
    found = [re.fullmatch(r"sglang-(.+)\.dist-info", folder.name) for folder in site.glob("sglang-*.dist-info")]
    return found[0][1] if found and found[0] else site.name


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
        self.about: dict[str, str] = {}  # what is run, on what: written beside the rows
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
                run = {"about": self.about, "parts": names, "rows": rows, "facts": facts}
                draft.write_text(json.dumps(run, default=str))
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
