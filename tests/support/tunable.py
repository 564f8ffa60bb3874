# SPDX-License-Identifier: Apache-2.0
"""An HTTP server that answers as a DDTREE server does, at a speed of its own for each budget, or badly in many ways."""

from __future__ import annotations

import datetime
import http.server
import ipaddress
import json
import ssl
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


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


def certificate(folder: Path) -> tuple[Path, Path]:
    """Files with a self-signed certificate for 127.0.0.1 and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tunable")])
    now = datetime.datetime.now(datetime.timezone.utc)
    place = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(place, critical=False)
        .sign(key, hashes.SHA256())
    )
    files = folder / "certificate.pem", folder / "key.pem"
    files[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    files[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))
    return files


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
        tls: Files with its certificate and key; None: no TLS.
    """

    info: dict[str, Any] = field(default_factory=lambda: dict(INFO))
    seconds: dict[str, float] = field(default_factory=dict)
    key: str = ""
    load: int | None = 0
    refuses: tuple[str, ...] = ()
    dies_after: int | None = None
    raw: bytes | None = None
    tls: tuple[Path, Path] | None = None
    #: Arm of each request and how many were in flight with it, itself included.
    seen: list[tuple[str, int]] = field(default_factory=list)
    #: What `auto` chooses, and what a server does that has no room for an arm: arm -> what its steps are instead.
    instead: dict[str, str] = field(default_factory=lambda: {"auto": "7"})
    #: Steps by what they were drafted with; None: it does not count.
    steps: dict[str, int] | None = field(default_factory=dict)
    flying: int = 0
    #: How often it was asked how busy it is.
    asked: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> Tunable:
        outer = self

        class Handler(_Handler):
            tunable = outer

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        if self.tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*self.tls)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
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
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}"


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
            server.asked += self.path.startswith("/v1/loads")
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
