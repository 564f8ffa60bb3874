# SPDX-License-Identifier: Apache-2.0
"""An HTTP server that answers as a DDTREE server does, at a speed of its own for each budget, or badly in many ways."""

from __future__ import annotations

import http.server
import json
import threading
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any


INFO: dict[str, Any] = {
    "version": "0.5.17",
    "served_model_name": "tiny",
    "api_key": "hush-hush",
    "speculative_algorithm": "DDTREE",
    "speculative_dflash_block_size": 8,
    "speculative_ddtree_budget": "auto",
    "speculative_ddtree_budgets": [4, 7, 16],
    "speculative_ddtree_overlay_id": "d61ee96d3814",
    "skip_tokenizer_init": False,
    "max_running_requests": 8,
    "internal_states": [{}],
}


#: Its arms, in the order of the table.
ARMS = ("chain", "4", "7", "16", "auto")
#: For what any measurement shows.
SHORT = ("--rounds", "1", "--requests", "1", "--concurrency", "1", "--no-plot")
#: For what takes several rounds and concurrencies.
QUICK = ("--rounds", "3", "--requests", "4", "--concurrency", "1,4", "--no-plot")


@dataclass
class Tunable:
    """The server; a context manager.

    Args:
        info: What it says of itself.
        seconds: Arm (`chain`, a budget, `auto`) -> seconds of a request, 0.02 for others.
        key: The API key that it wants.
        load: Requests of others that it reports; None: it has no such page.
        refuses: Arms that it answers with an error.
        dies_after: Requests of /generate after which it hangs up on everything.
        raw: Bytes that it answers to everything instead.
    """

    info: dict[str, Any] = field(default_factory=lambda: dict(INFO))
    seconds: dict[str, float] = field(default_factory=dict)
    key: str = ""
    load: int | None = 0
    refuses: tuple[str, ...] = ()
    dies_after: int | None = None
    raw: bytes | None = None
    #: Arm of each request and how many were in flight with it, itself included.
    seen: list[tuple[str, int]] = field(default_factory=list)
    #: What `auto` chooses, and what a server does that has no room for an arm: arm -> what its steps are instead.
    instead: dict[str, str] = field(default_factory=lambda: {"auto": "7"})
    #: Steps by what they were drafted with; None: it does not count.
    steps: dict[str, int] | None = field(default_factory=dict)
    flying: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> Tunable:
        outer = self

        class Handler(_Handler):
            tunable = outer

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def port(self) -> int:
        """Where it listens on the loopback device."""
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """The same as a URL."""
        return f"http://127.0.0.1:{self.port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    tunable: Tunable
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        # Header and body go out apart; on a kept connection Nagle would hold the body back for 40 ms.
        self.connection.setsockopt(6, 1, 1)

    def handle_one_request(self) -> None:
        if self.tunable.raw is not None:
            self.connection.recv(65536)
            self.wfile.write(self.tunable.raw)
            self.close_connection = True
            return
        super().handle_one_request()

    def do_GET(self) -> None:
        server = self.tunable
        counted = {} if server.steps is None else {"ddtree_steps": dict(server.steps)}
        pages: dict[str, Any] = {"/server_info": {**server.info, "internal_states": [counted]}}
        if server.load is not None:
            rows = [{"num_running_reqs": server.load + server.flying, "num_waiting_reqs": 0}]
            pages["/v1/loads?include=core"] = {"loads": rows}
        self._answer(200 if self.path in pages else 404, pages.get(self.path, {"detail": "Not Found"}))

    def do_POST(self) -> None:
        server = self.tunable
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        sampling = body["sampling_params"]
        arm = str(sampling.get("custom_params", {}).get("ddtree_budget", "auto"))
        with server.lock:
            server.flying += 1
            server.seen.append((arm, server.flying))
        time.sleep(server.seconds.get(arm, 0.02) if sampling["max_new_tokens"] > 1 else 0.0)
        with server.lock:
            server.flying -= 1
            if server.steps is not None:
                ran = server.instead.get(arm, arm)
                server.steps[ran] = server.steps.get(ran, 0) + 10
        if arm in server.refuses:
            self._answer(400, {"error": {"message": f"no lane for {arm}\x1b[31m"}})
            return
        tokens = int(sampling["max_new_tokens"])
        meta = {"completion_tokens": tokens, "spec_verify_ct": max(1, tokens // 3), "finish_reason": {"type": "length"}}
        self._answer(200, {"text": "", "meta_info": meta})

    def _answer(self, code: int, value: Any) -> None:
        server = self.tunable
        if server.dies_after is not None and len(server.seen) > server.dies_after:
            self.close_connection = True
            return
        if server.key and self.headers.get("Authorization") != f"Bearer {server.key}":
            code, value = 401, {"error": "Unauthorized"}
        data = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""
