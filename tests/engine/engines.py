# SPDX-License-Identifier: Apache-2.0
"""Engines and other jobs in patched SGLangs for the tests of all modules, two at a time."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.engine import harness, scenarios

from ddtree_overlay.patching import SUPPORTED_RELEASES
from ddtree_overlay.wheels import wheel_of


EVERY = frozenset(SUPPORTED_RELEASES)


class Sites(dict[str, Path]):
    """Every supported SGLang from its wheel, patched by the product once, when it is asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._locks: dict[str, threading.Lock] = {}

    def __missing__(self, version: str) -> Path:
        with self._locks.setdefault(version, threading.Lock()):
            if version not in self.keys():
                wheel = wheel_of(version, harness.PROJECT / ".cache")
                self[version] = harness.patched_site(wheel, self._folder / version)
        return self[version]


class Queue:
    """Jobs that wait for the whole queue to be known, so that those of a release run one after the other.

    A release is imported by one process that forks its jobs (see `warm.py`); few of these processes stay. The releases
    with few jobs come first.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=int(os.environ.get("DDTREE_TEST_ENGINES", "2")))
        self._waiting: list[tuple[str, Future[Any], Callable[[], Any]]] = []
        self._begun = False

    def add(self, release: str, job: Callable[[], Any]) -> Future[Any]:
        """A job's result to come."""
        future: Future[Any] = Future()
        self._waiting.append((release, future, job))
        if self._begun:
            self.begin()
        return future

    def begin(self) -> None:
        """Run what waits."""
        self._begun = True
        releases = [release for release, *_ in self._waiting]
        order = sorted(dict.fromkeys(releases), key=releases.count)
        for _, future, job in sorted(self._waiting, key=lambda waiting: order.index(waiting[0])):
            self._pool.submit(_settle, future, job)
        self._waiting = []

    def close(self) -> None:
        """Drop what has not started."""
        self._pool.shutdown(cancel_futures=True)


def _settle(future: Future[Any], job: Callable[[], Any]) -> None:
    try:
        future.set_result(job())
    except BaseException as error:
        future.set_exception(error)


class Engines:
    """A module's jobs by name, with their results and traces.

    Args:
        folder: A job's files lie in `folder / name`.
        queue: Takes the jobs; without one they begin at once.
        wanted: Of the jobs that are named after a release, those that are asked for; others begin when they are.
    """

    def __init__(self, folder: Path, queue: Queue | None = None, wanted: frozenset[str] = EVERY) -> None:
        self.folder = folder
        self._wanted = wanted
        self._later: dict[str, tuple[str, Callable[[], Any]]] = {}
        self._queue = queue or Queue()
        if queue is None:
            self._queue.begin()
        self._jobs: dict[str, Future[Any]] = {}

    def start(
        self,
        name: str,
        site: Path | Callable[[], Path],
        args: dict[str, Any],
        calls: list[dict[str, Any]],
        *,
        release: str = "",
        cold: bool = False,
        **environment: str,
    ) -> None:
        """Queue an engine.

        Args:
            name: Of the job.
            site: Where SGLang lies, or what prepares it when the job begins.
            args: Of the engine.
            calls: What it runs: see `scripts/engine_job`.
            release: Groups jobs in the queue.
            cold: See `harness.decode`.
            environment: More variables.
        """
        folder = self.folder / name

        def job() -> dict[str, Any]:
            place = site() if callable(site) else site
            return harness.decode(place, args, calls, folder, cold=cold, **environment)

        self.submit(name, job, release=release or str(site))

    def submit(self, name: str, job: Callable[[], Any], *, release: str) -> None:
        """Queue any other job of a release."""
        if name in EVERY and name not in self._wanted:
            self._later[name] = release, job
        else:
            self._jobs[name] = self._queue.add(release, job)

    def __getitem__(self, name: str) -> Any:
        """The result of a job, waited for."""
        if name in self._later:
            self._jobs[name] = self._queue.add(*self._later.pop(name))
        return self._jobs[name].result()

    def trace_file(self, name: str) -> str:
        """Where the trees (or chains) go that a job verifies."""
        return str(self.folder / name / "trace.jsonl")

    def trace(self, name: str) -> list[dict[str, Any]]:
        """The trees (or chains) that the job verified."""
        self[name]
        return harness.read_lines(Path(self.trace_file(name)))

    def steps(self, name: str) -> list[list[dict[str, Any]]]:
        """The same by request, in the order in which the calls ask: which ones share a step is a matter of time."""
        by_request: dict[str, list[dict[str, Any]]] = {}
        for line in self.trace(name):
            by_request.setdefault(line["rid"], []).append(line)
        return [by_request.get(rid, []) for call in self[name]["calls"] for rid in call["rids"]]

    def kv(self, name: str) -> list[dict[str, Any]]:
        """The KV of each request that left the job's engine."""
        self[name]
        return harness.read_lines(self.folder / name / "kv.jsonl")

    def close(self) -> None:
        """Drop what has not started."""
        self._queue.close()


class Release:
    """Starts engines of one release in which flows of requests run: eight at a time, with text, in a long context.

    Args:
        engines: Take the jobs.
        sites: Where the release lies.
        version: Which.
        ahead: Whether the scheduler runs ahead of the results (overlap scheduling).
    """

    def __init__(self, engines: Engines, sites: Sites, version: str, *, ahead: bool) -> None:
        self._engines, self._sites, self.version, self._ahead = engines, sites, version, ahead
        self.room = {
            "model_path": str(harness.text_target(engines.folder / f"target-{version}")),
            "skip_tokenizer_init": False,
            "context_length": scenarios.CONTEXT,
            "max_total_tokens": 4096,
            "max_running_requests": 8,
        }

    def site(self) -> Path:
        """Where it lies, patched."""
        return self._sites[self.version]

    def plain(self, name: str, calls: list[dict[str, Any]], **more: Any) -> None:
        """Plain decoding."""
        self.start(name, harness.engine_args(None, **self.room | more), calls)

    def dflash(self, name: str, calls: list[dict[str, Any]]) -> None:
        """DFLASH, traced; in little room."""
        args = harness.engine_args("DFLASH", disable_overlap_schedule=not self._ahead)
        self.start(name, args, calls, DDTREE_TEST_CHAIN_TRACE=self._engines.trace_file(name))

    def ddtree(
        self,
        name: str,
        budget: int,
        calls: list[dict[str, Any]],
        *,
        traced: bool = False,
        site: Callable[[], Path] | None = None,
        cold: bool = False,
        environment: dict[str, str] | None = None,
        **more: Any,
    ) -> None:
        """A tree.

        Args:
            name: Of the job.
            budget: Nodes beside the root.
            calls: What to decode.
            traced: Whether the trees are written down.
            site: Another SGLang than the release's own.
            cold: See `harness.decode`.
            environment: More variables.
            more: Other arguments of the engine.
        """
        own = {"disable_overlap_schedule": not self._ahead, "speculative_ddtree_budget": budget}
        variables = {"SGLANG_DDTREE_TRACE": self._engines.trace_file(name)} if traced else {}
        args = harness.engine_args("DDTREE", **own | self.room | more)
        self.start(name, args, calls, site=site, cold=cold, **variables | (environment or {}))

    def start(
        self,
        name: str,
        args: dict[str, Any],
        calls: list[dict[str, Any]],
        *,
        site: Callable[[], Path] | None = None,
        cold: bool = False,
        **environment: str,
    ) -> None:
        """Any engine: see `Engines.start`."""
        place = site or self.site
        self._engines.start(name, place, args, calls, release=self.version, cold=cold, **environment)

    def script(self, name: str, file: str, *words: str) -> None:
        """A script of this folder with a patched SGLang on its path: `name` gives what it writes to its last argument.

        Args:
            name: Of the job.
            file: The script.
            words: Arguments before the last one, the file of the result.
        """

        def job() -> Any:
            folder = self._engines.folder / name
            folder.mkdir(parents=True, exist_ok=True)
            result = folder / "result.json"
            script = str(harness.PROJECT / "tests/engine" / file)
            harness.run_script(self.site(), [script, *words, str(result)], folder / "log.txt", timeout=900)
            return json.loads(result.read_text())

        self._engines.submit(name, job, release=self.version)
