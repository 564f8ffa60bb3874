# SPDX-License-Identifier: Apache-2.0
"""A real `sglang.launch_server` on the CPU, with the tiny pair."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.engine import harness


START_SECONDS = 240


@dataclass
class Serving:
    """A running server; a context manager that ends it with every process that it started."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path

    @classmethod
    def start(cls, site: Path, arguments: Mapping[str, Any], folder: Path, **environment: str) -> Serving:
        """Start it with these fields of `harness.engine_args` as flags; `wait` says when it answers."""
        folder.mkdir(parents=True, exist_ok=True)
        port = _free_port()
        command = [str(harness.python_of(site)), "-m", "sglang.launch_server", *_flags(arguments)]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        if arguments.get("attention_backend") == "triton":
            environment = {"TRITON_INTERPRET": "1", **environment}
        if arguments.get("speculative_algorithm") == "DFLASH":
            environment = {"DDTREE_TEST_KEEP_DTYPE": "1", **environment}
        log = folder / "log.txt"
        with log.open("w") as out:
            process = subprocess.Popen(
                command,
                env=harness.engine_environment(site, HF_HUB_OFFLINE="1", **environment),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        return cls(port, process, log)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def wait(self) -> Serving:
        """Wait until it generates."""
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self.process.poll() is None:
            try:
                if self.get("/health_generate")[0] == 200:
                    return self
            except OSError:
                time.sleep(0.5)
        raise harness.EngineError("\n".join(self.log.read_text().splitlines()[-40:]))

    def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON body of one GET."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read()
            return answer.status, json.loads(body) if body.startswith((b"{", b"[")) else body
        finally:
            connection.close()

    def kill(self) -> None:
        """End it, its scheduler and its detokenizer at once."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.process.wait()

    def __enter__(self) -> Serving:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


def _free_port() -> int:
    """A free port that leaves room above it: SGLang takes the one 10,000 higher for gRPC."""
    for port in random.sample(range(20000, 32000), 100):
        with contextlib.suppress(OSError), socket.socket() as sock:
            sock.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port between 20000 and 32000")


def _flags(arguments: Mapping[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in arguments.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words += [flag] if value else []
        else:
            words += [flag, str(value)]
    return words
