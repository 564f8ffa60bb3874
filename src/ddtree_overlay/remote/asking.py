# SPDX-License-Identifier: Apache-2.0
"""What a running server says of itself, asked over HTTP from the host that it runs on."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from .common import Refusal


#: SGLang 0.5.11 knows both, and warns of the second; earlier releases know that one alone.
_INFO = ("/server_info", "/get_server_info")
#: Answers only once the server is warm and the scheduler has made a token; SGLang itself gives that 20 s.
_GENERATE = "/health_generate"
_INFO_SECONDS, _GENERATE_SECONDS = 10.0, 25.0
_MOST_BYTES = 16 * 1024 * 1024
#: In place of a status: this can be no server of ours, whether it runs or not.
_WRONG_DOOR = 0
#: No restart makes these better: no such host, another protocol, a certificate that is not trusted.
_HOPELESS = (socket.gaierror, ssl.SSLError, http.client.HTTPException)
#: But these come from a server, or what stands before it, that is stopping or starting.
_PASSING = (http.client.RemoteDisconnected, http.client.IncompleteRead, ssl.SSLEOFError, ssl.SSLZeroReturnError)


@dataclass(frozen=True)
class Heard:
    """One answer. `kind` is `up` (it generates), `starting`, `down` (nobody listens), `denied` or `foreign`."""

    kind: str
    text: str
    algorithm: str | None = None
    overlay_id: str | None = None

    @property
    def told(self) -> bool:
        """Whether the server said what it runs."""
        return self.kind in ("up", "starting")

    def named(self) -> str:
        """What it runs, in words."""
        overlay = f"overlay {self.overlay_id}" if self.overlay_id else "no overlay"
        return f"{overlay}, algorithm {self.algorithm or 'none'}"


def ask(url: str, key: str = "", seconds: float = _INFO_SECONDS) -> Heard:
    """Ask the server at `url`, for `seconds` at most (a little more while it generates)."""
    for path in _INFO:
        code, body = get(url, path, key, min(seconds, _INFO_SECONDS))
        if code != 404:
            break
    info = _info(body) if code == 200 else None
    if info is None:
        return _unheard(path, code, body)
    algorithm, overlay_id = (_text(info.get(k)) for k in ("speculative_algorithm", "speculative_ddtree_overlay_id"))
    heard = Heard("up", "", algorithm, overlay_id)
    code, body = get(url, _GENERATE, key, min(seconds, _GENERATE_SECONDS))
    if code == 200:
        return replace(heard, text=heard.named())
    why = f"answers {code}" if code else body.decode("utf-8", "replace")
    return replace(heard, kind="starting", text=f"{heard.named()}, but {_GENERATE}: {why}")


def _unheard(path: str, code: int | None, body: bytes) -> Heard:
    """Why a server has not said what it runs."""
    if code in (401, 403):
        return Heard("denied", f"{path} wants an API key ({code})")
    if not code:
        return Heard("down" if code is None else "foreign", body.decode("utf-8", "replace"))
    if code >= 500:
        return Heard("down", f"{path} answers {code}")
    return Heard("foreign", f"{path} does not answer like SGLang ({code})")


def read_key(path: str | None) -> str:
    """The API key in the file at `path`, or "" without one.

    Raises:
        Refusal: It cannot be read.
    """
    if not path:
        return ""
    fault = "it is not one line of ASCII text"
    try:
        with open(path, "rb") as stream:
            key = stream.read(4096).strip().decode("ascii", "replace")
    except OSError as e:
        key, fault = "", e.strerror or str(e)
    if key and key.isascii() and key.isprintable():
        return key
    raise Refusal(
        "failed",
        f"the API key in {path} cannot be used: {fault}",
        why="nothing was changed",
        next_step="correct api_key_file in deploy.toml, or let the login read that file",
    )


def get(url: str, path: str, key: str, seconds: float) -> tuple[int | None, bytes]:
    """Status and body of one request, or None and the reason; no proxy, no redirect, over after `seconds`."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=seconds)
    # A timeout of the socket counts from the last byte; a server that drips would never be done.
    cut = threading.Event()
    end = threading.Timer(seconds, _cut, (connection, cut))
    end.daemon = True
    end.start()
    try:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        connection.connect()
        if cut.is_set():
            raise TimeoutError  # the time was over before there was a socket that could be ended
        connection.request("GET", parts.path.rstrip("/") + path, headers=headers)
        response = connection.getresponse()
        body = response.read(_MOST_BYTES)
        if response.length and len(body) < _MOST_BYTES:
            raise ConnectionResetError("the answer was cut short")
        return response.status, body
    except (OSError, http.client.HTTPException, ValueError) as e:
        if cut.is_set():
            return None, f"no answer within {seconds:.0f} s".encode()
        if isinstance(e, _HOPELESS) and not isinstance(e, _PASSING):
            return _WRONG_DOOR, f"{parts.netloc}: {_reason(e)}".encode()
        return None, _reason(e).encode()
    finally:
        end.cancel()
        connection.close()


def _cut(connection: http.client.HTTPConnection, cut: threading.Event) -> None:
    # Before the socket ends: whoever reads from it must know why.
    cut.set()
    with contextlib.suppress(OSError, AttributeError):
        connection.sock.shutdown(socket.SHUT_RDWR)


def _reason(e: Exception) -> str:
    if isinstance(e, TimeoutError):
        return "no answer in time"
    text = getattr(e, "strerror", None) or str(e) or type(e).__name__
    if isinstance(e, http.client.BadStatusLine) and not isinstance(e, http.client.RemoteDisconnected):
        text = f"it does not speak HTTP: {text}"
    # Whatever listens there may have written it.
    return "".join(c if c.isprintable() else "?" for c in text.strip()[:200])


def _info(body: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and "speculative_algorithm" in value else None


def _text(value: Any) -> str | None:
    return value[:100] if isinstance(value, str) and value.isprintable() else None
