# SPDX-License-Identifier: Apache-2.0
"""A server over HTTP: a connection is kept for many requests, each of which comes to an end."""

from __future__ import annotations

import contextlib
import errno
import functools
import http.client
import json
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

from ddtree_overlay.config_keys import is_loopback
from ddtree_overlay.errors import AuthenticationError, ConnectionFailedError, OverlayError


_MOST_BYTES = 16 * 1024 * 1024
_INFO_SECONDS = 20.0
#: Opens a connection to an address and a port within so many seconds.
Dial = Callable[[str, int, float], socket.socket]


class NoAnswerError(Exception):
    """A request came to nothing; the text says why."""


@dataclass(slots=True)
class Api:
    """How to reach one server.

    Args:
        url: Where it listens.
        seconds: Patience with one request.
        key: Its API key, or "".
        dial: How a connection is opened; directly, or through a tunnel.
        fault: Why connections of `dial` break off, beside what the server does; "" when there is no such reason.
    """

    url: str
    seconds: float
    key: str = field(default="", repr=False)
    dial: Dial = lambda address, port, seconds: socket.create_connection((address, port), seconds)
    fault: Callable[[], str] = lambda: ""

    def connection(self) -> Connection:
        """A connection that is opened by its first request."""
        return Connection(self)

    def ask(self, path: str) -> tuple[int, Any]:
        """Status and JSON of one GET; None for what is no JSON.

        Raises:
            ConnectionFailedError: No answer, or none that can be trusted.
        """
        connection = self.connection()
        try:
            status, body = connection.send("GET", path, None, min(self.seconds, _INFO_SECONDS))
        except NoAnswerError as e:
            if isinstance(e.__cause__, OverlayError):
                raise e.__cause__ from None
            raise ConnectionFailedError(
                f"no answer from {self.url}",
                why=str(e),
                next_step="check that the server runs and listens there; --timeout SECONDS waits longer"
                + ("" if self.url.startswith("https:") else "; if it speaks TLS, name it as https://"),
            ) from e
        finally:
            connection.close()
        if status in {401, 403}:
            raise AuthenticationError(
                f"the server at {self.url} refuses {'the API key' if self.key else 'to answer without an API key'}",
                why=f"{path} answers {status}",
                next_step="check what the variable that --api-key-env names holds"
                if self.key
                else "put the key into an environment variable and name it with --api-key-env NAME",
            )
        return status, _json(body)

    def server_info(self) -> dict[str, Any]:
        """The answer of `/server_info`, or of its older name.

        Raises:
            OverlayError: What listens there does not answer as SGLang does.
        """
        status, found = self.ask("/server_info")
        if status == 404:
            status, found = self.ask("/get_server_info")
        if status == 200 and isinstance(found, dict) and "speculative_algorithm" in found:
            return found
        raise OverlayError(
            f"what listens at {self.url} does not answer like SGLang",
            why=f"/server_info answers {status}" + ("" if status != 200 else ", but no server arguments"),
            next_step="name the address of the server itself, not of a gateway or of another service",
        )

    def load(self) -> Any:
        """The answer of `/v1/loads`, or of its older name; None when there is neither."""
        for path in ("/v1/loads?include=core", "/get_load"):
            status, found = self.ask(path)
            if status == 200:
                return found
        return None


class Connection:
    """One connection; it opens again when the server has closed it between two requests."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._parts = urlsplit(api.url)
        self._http: http.client.HTTPConnection | None = None
        self._cut = threading.Event()

    def generate(self, body: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The answer of `/generate`.

        Raises:
            NoAnswerError: There is none, or it is an error.
        """
        status, data = self.send("POST", "/generate", body, seconds)
        found = _json(data)
        if status != 200:
            raise NoAnswerError(f"/generate answers {status}: {_message(found, data)}")
        if not isinstance(found, dict) or not isinstance(found.get("meta_info"), dict):
            raise NoAnswerError("/generate answers without meta_info")
        return found

    def send(self, method: str, path: str, body: Any, seconds: float) -> tuple[int, bytes]:
        """Status and body of one request, which is over after `seconds`.

        Raises:
            NoAnswerError: It came to nothing.
        """
        reused = self._http is not None
        # A timeout of a socket counts from the last byte; a server that drips would never be done.
        timer = threading.Timer(seconds, self.cut)
        timer.daemon = True
        timer.start()
        try:
            try:
                found = self._exchange(method, path, body, seconds)
            except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
                if not reused or self._cut.is_set():
                    raise
                self.close()
                found = self._exchange(method, path, body, seconds)
            if self._cut.is_set():
                raise TimeoutError  # what was cut off can look like an answer that ends there
        except (OSError, http.client.HTTPException, ValueError) as e:
            self.close()
            cut = self._cut.is_set() or isinstance(e, TimeoutError)
            raise NoAnswerError(f"no answer within {seconds:.0f} s" if cut else self._api.fault() or _reason(e)) from e
        except OverlayError as e:
            self.close()
            raise NoAnswerError(f"{e.what}{f': {e.why}' if e.why else ''}") from e
        else:
            return found
        finally:
            timer.cancel()

    def _exchange(self, method: str, path: str, body: Any, seconds: float) -> tuple[int, bytes]:
        if self._http is None:
            self._http = _open(self._parts, self._api, seconds)
        self._http.timeout = seconds
        if self._http.sock is not None:
            self._http.sock.settimeout(seconds)
        else:
            self._http.connect()
        if self._cut.is_set():
            raise TimeoutError  # the time was over before there was a socket that could be ended
        headers = {"Authorization": f"Bearer {self._api.key}"} if self._api.key else {}
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        self._http.request(method, self._parts.path.rstrip("/") + path, data, headers)
        answer = self._http.getresponse()
        found = answer.read(_MOST_BYTES)
        if answer.length and len(found) < _MOST_BYTES:
            raise ConnectionResetError("the answer was cut short")
        if answer.will_close or len(found) == _MOST_BYTES:
            self.close()
        return answer.status, found

    def cut(self) -> None:
        """End the request that is under way, from another thread; no other can be sent any more."""
        # Before the socket ends: whoever reads from it must know why.
        self._cut.set()
        held = self._http
        with contextlib.suppress(OSError, AttributeError):
            held.sock.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]  # or there is none, which is as good

    def close(self) -> None:
        """Drop the connection."""
        held, self._http = self._http, None
        if held is not None:
            held.close()


class _Dialled(http.client.HTTPConnection):
    """An `HTTPConnection` whose socket comes from `dial`, in TLS where the URL says so."""

    def __init__(self, host: str, port: int, seconds: float, dial: Dial, context: ssl.SSLContext | None) -> None:
        super().__init__(host, port, timeout=seconds)
        self._dial, self._context = dial, context

    def connect(self) -> None:
        """As http.client asks for it."""
        sock = self._dial(self.host, self.port, float(self.timeout or _INFO_SECONDS))
        with contextlib.suppress(OSError):  # the end of a tunnel is no TCP socket
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # From here on `cut` reaches it.
        self.sock = sock
        if self._context is not None:
            self.sock = self._context.wrap_socket(sock, server_hostname=self.host)


def _open(parts: SplitResult, api: Api, seconds: float) -> http.client.HTTPConnection:
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    return _Dialled(parts.hostname or "", port, seconds, api.dial, _trust() if secure else None)


@functools.cache
def _trust() -> ssl.SSLContext:
    """The system's certificates, or those that SSL_CERT_FILE names. Reading them takes longer than a request."""
    return ssl.create_default_context()


def travels_open(url: str) -> bool:
    """Whether a key sent to `url` can be read on the way."""
    parts = urlsplit(url)
    return parts.scheme != "https" and not is_loopback(parts.hostname or "")


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _message(found: Any, body: bytes) -> str:
    """What an error answer says, one short line of it."""
    inner = found.get("error", found) if isinstance(found, dict) else None
    text = inner.get("message") if isinstance(inner, dict) else inner
    return line(text if isinstance(text, str) else body.decode("utf-8", "replace"))


def _reason(e: Exception) -> str:
    if isinstance(e, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {line(e.verify_message)} (SSL_CERT_FILE names another authority)"
    if isinstance(e, ssl.SSLError) and e.reason in {"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"}:
        return "it does not speak TLS: name it as http://"
    if getattr(e, "errno", None) == errno.EMFILE:
        return "too many open files on this machine (ulimit -n)"
    text = getattr(e, "strerror", None) or str(e) or type(e).__name__
    if isinstance(e, http.client.BadStatusLine) and not isinstance(e, http.client.RemoteDisconnected):
        text = f"it does not speak HTTP: {text}"
    return line(text)


def line(text: str) -> str:
    """What another machine wrote as one short line that a terminal can show."""
    return "".join(c if c.isprintable() else " " for c in text.strip()[:200])
