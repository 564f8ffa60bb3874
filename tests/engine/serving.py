# SPDX-License-Identifier: Apache-2.0
"""A real SGLang server on the CPU, with the tiny pair, forked from a process that has imported SGLang already."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.engine import harness, warm
from tests.support.ports import free_port


#: These tell what hangs from what a busy machine takes.
START_SECONDS, ANSWER_SECONDS = 1200, 300


def text_arguments(algorithm: str | None, folder: Path, **extra: Any) -> dict[str, Any]:
    """Arguments of a server that takes text; its target is made in `folder`, unless it is there."""
    target = folder / "target"
    if not target.exists():
        harness.text_target(target)
    return harness.engine_args(algorithm, model_path=str(target), skip_tokenizer_init=False, **extra)


@dataclass
class Serving:
    """A running server; a context manager that ends it with every process that it started."""

    port: int
    folder: Path
    thread: threading.Thread

    @classmethod
    def start(cls, site: Path, arguments: Mapping[str, Any], folder: Path) -> Serving:
        """Start it with these fields of `harness.engine_args` as flags; `wait` says when it answers."""
        folder.mkdir(parents=True, exist_ok=True)
        port = free_port()
        words = [str(harness.PROJECT / "tests/engine/serve.py"), str(folder / "pid"), *_flags(arguments)]
        words += ["--host", "127.0.0.1", "--port", str(port), "--nccl-port", str(free_port())]
        late = {"DDTREE_TEST_KEEP_DTYPE": "1"} if arguments.get("speculative_algorithm") == "DFLASH" else {}

        def run() -> None:
            base = harness.engine_environment(site, TRITON_INTERPRET="1")
            with contextlib.suppress(ValueError):  # it was killed before it could say its process group
                warm.run(harness.python_of(site), base, words, environment=late, log=folder / "log.txt", timeout=86400)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return cls(port, folder, thread)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def wait(self) -> Serving:
        """Wait until it generates."""
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self.thread.is_alive():
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_SECONDS)
            with contextlib.suppress(OSError), contextlib.closing(connection):
                connection.request("GET", "/health_generate")
                if connection.getresponse().status == 200:
                    return self
            time.sleep(0.3)
        log = self.folder / "log.txt"
        self.kill()
        raise harness.EngineError("\n".join(log.read_text().splitlines()[-40:]) if log.exists() else "it never ran")

    def get(self, path: str) -> str:
        """The page at a path."""
        return urllib.request.urlopen(f"{self.url}{path}", timeout=ANSWER_SECONDS).read().decode()

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """What it answers to a request."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}{path}", json.dumps(body).encode(), headers)
        answer: dict[str, Any] = json.loads(urllib.request.urlopen(request, timeout=ANSWER_SECONDS).read())
        return answer

    def is_idle(self) -> bool:
        """Whether nothing runs, not even the step behind the one that ended a request: then its cache is empty now."""
        flush = urllib.request.Request(f"{self.url}/flush_cache", method="POST")
        try:
            return bool(urllib.request.urlopen(flush, timeout=ANSWER_SECONDS).status == 200)
        except urllib.error.HTTPError:
            return False

    def kill(self) -> None:
        """End it, its scheduler and its detokenizer at once."""
        with contextlib.suppress(OSError, ValueError):
            os.killpg(int((self.folder / "pid").read_text()), signal.SIGKILL)
        self.thread.join(30)

    def __enter__(self) -> Serving:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


def _flags(arguments: Mapping[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in arguments.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words += [flag] if value else []
        else:
            words += [flag, str(value)]
    return words
