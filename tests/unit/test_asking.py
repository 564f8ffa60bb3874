# SPDX-License-Identifier: Apache-2.0
"""What a server's answer is taken for: real sockets, answers by hand."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.waiting import HANG

from ddtree_overlay.remote import asking
from ddtree_overlay.remote.asking import ask, read_key
from ddtree_overlay.remote.common import Refusal


INFO = json.dumps({"speculative_algorithm": "DDTREE", "speculative_ddtree_overlay_id": "33d0b6569ace"})
Answers = dict[str, tuple[int, str]]


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Serve `answers` by path (else 404); gives the URL. `drip` sends a byte now and then, until it is hung up on."""
    listeners = []

    def start(answers: Answers, *, drip: bool = False) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)
        threading.Thread(target=_loop, args=(listener, answers, drip), daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for listener in listeners:
        listener.close()


def _loop(listener: socket.socket, answers: Answers, drip: bool) -> None:
    while True:
        try:
            peer, _ = listener.accept()
        except OSError:
            return
        asked = peer.recv(4096).split()[1:2]  # nothing from one that has hung up already
        code, body = answers.get(b"".join(asked).decode(), (404, "{}"))
        head = f"HTTP/1.1 {code} X\r\nContent-Length: {len(body)}\r\n\r\n"
        try:
            if drip:
                while True:
                    peer.sendall(b"H")
                    time.sleep(0.1)
            peer.sendall((head + body).encode())
        except OSError:
            pass
        peer.close()


@pytest.mark.parametrize(
    ("answers", "kind", "says"),
    [
        ({"/server_info": (200, INFO), "/health_generate": (200, "")}, "up", "overlay 33d0b6569ace, algorithm DDTREE"),
        ({"/get_server_info": (200, INFO), "/health_generate": (200, "")}, "up", "overlay 33d0b6569ace"),
        ({"/server_info": (200, INFO), "/health_generate": (503, "")}, "starting", "/health_generate: answers 503"),
        # A proxy in front of a server that is down says nothing about what that runs.
        ({"/server_info": (503, "")}, "down", "answers 503"),
        ({"/server_info": (401, "")}, "denied", "wants an API key"),
        ({"/server_info": (200, "<html>")}, "foreign", "does not answer like SGLang (200)"),
        ({"/server_info": (200, "[" * 100_000)}, "foreign", "does not answer like SGLang"),
        ({"/server_info": (200, '{"status": "ok"}')}, "foreign", "does not answer like SGLang"),
        ({"/server_info": (302, "")}, "foreign", "does not answer like SGLang (302)"),
        ({}, "foreign", "does not answer like SGLang (404)"),
    ],
)
def test_answer(serve: Callable[..., str], answers: Answers, kind: str, says: str):
    """Only an answer that names the algorithm counts as a server that said what it runs."""
    heard = ask(serve(answers), seconds=HANG)

    assert (heard.kind, heard.told) == (kind, kind in {"up", "starting"})
    assert says in heard.text


def test_a_server_that_drips_is_not_waited_for_without_end(serve: Callable[..., str]):
    """Each byte restarts a socket's own timeout; the question has an end all the same."""
    start = time.monotonic()

    heard = ask(serve({}, drip=True), seconds=1)

    assert (heard.kind, heard.text) == ("down", "no answer within 1 s")
    assert time.monotonic() - start < HANG


def test_a_connection_that_takes_all_the_time_is_not_read_from(
    serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch
):
    """The time is over before there is a socket that could be ended; then this one drips."""
    monkeypatch.setattr(asking.threading.Timer, "start", lambda timer: timer.function(*timer.args))

    assert ask(serve({}, drip=True), seconds=1).text == "no answer within 1 s"


@pytest.mark.parametrize(
    ("answer", "kind", "says", "scheme"),
    [
        (b"\x1b[2JSSH-2.0-x\r\n", "foreign", "it does not speak HTTP: ?[2JSSH-2.0-x", "http"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 500, "foreign", "got more than 100 headers", "http"),
        (b"", "down", "Remote end closed connection without response", "http"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", "down", "the answer was cut short", "http"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "foreign", "SSL", "https"),
    ],
)
def test_what_speaks_another_protocol_is_no_server_of_ours(answer: bytes, kind: str, says: str, scheme: str):
    """Refused before anything is written, as no restart makes it better; what it says cannot steer a terminal."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_say, args=(listener, answer), daemon=True).start()
        heard = ask(f"{scheme}://127.0.0.1:{listener.getsockname()[1]}", seconds=HANG)

    assert heard.kind == kind
    assert says in heard.text


def _say(listener: socket.socket, answer: bytes) -> None:
    peer, _ = listener.accept()
    with peer:
        peer.recv(4096)
        peer.sendall(answer)


def test_nobody_listens():
    """The reason is the system's own."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        assert ask(f"http://127.0.0.1:{closed.getsockname()[1]}").text == "Connection refused"


@pytest.mark.parametrize("content", [b"", b"\n", b"hush\nhush", "schlüssel".encode(), b"hu\x00sh"])
def test_a_key_that_cannot_be_sent_is_refused_without_being_shown(tmp_path: Path, content: bytes):
    """http.client would name the whole header in its error."""
    (tmp_path / "key").write_bytes(content)

    with pytest.raises(Refusal, match="cannot be used: it is not one line of ASCII text") as caught:
        read_key(str(tmp_path / "key"))

    assert "hush" not in caught.value.what
