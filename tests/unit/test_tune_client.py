# SPDX-License-Identifier: Apache-2.0
"""The HTTP client of `tune` against servers that never end an answer, or that write anything at all."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from tests.support.waiting import HANG

from ddtree_overlay.config_keys import is_loopback
from ddtree_overlay.errors import ConnectionFailedError, OverlayError
from ddtree_overlay.tuning.client import Api, NoAnswerError, travels_open


def forever(first: bytes, piece: bytes, pause: float = 0.05) -> Callable[[socket.socket], None]:
    def answer(client: socket.socket) -> None:
        client.sendall(first)
        while True:
            client.sendall(piece)
            time.sleep(pause)

    return answer


def once(data: bytes) -> Callable[[socket.socket], None]:
    return lambda client: client.sendall(data)


@contextlib.contextmanager
def listening(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that calls `answer` with each connection once something was asked."""

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=one, args=(client,), daemon=True).start()

    def one(client: socket.socket) -> None:
        with contextlib.suppress(OSError), client:
            client.recv(65536)
            answer(client)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    "answer",
    [
        forever(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b" "),
        forever(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        forever(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"),
        forever(b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.01),
        forever(b"", b"", 5),
    ],
    ids=["body", "chunks", "headers", "continues", "silence"],
)
def test_an_answer_that_never_ends_is_cut_off_in_time(answer):
    """Each byte resets the timeout of a socket; the bound is on the whole answer."""
    start = time.monotonic()
    with listening(answer) as url, pytest.raises(ConnectionFailedError) as caught:
        Api(url, 0.7).server_info()

    assert "no answer within 1 s" in caught.value.why and time.monotonic() - start < HANG


def test_a_connection_that_takes_all_the_time_is_not_read_from():
    """The request is over before there is a socket that could be ended; then this one drips."""

    def dial(address: str, port: int, seconds: float) -> socket.socket:
        connection._cut.wait(HANG)
        return socket.create_connection((address, port), seconds)

    with listening(forever(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n")) as url:
        connection = Api(url, HANG, dial=dial).connection()
        with pytest.raises(NoAnswerError, match="no answer within 0 s"):
            connection.send("GET", "/server_info", None, 0.2)


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"HTTP/1.1 204 No\r\n\r\n",
        b"HTTP/1.1 999999 No\r\n\r\n",
        b"HTTP/9.9 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"\x16\x03\x01\x02\x00\x01",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n1e999",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 500 + b"\r\n",
        b"HTTP/1.1 200 \x1b[31mOK\r\n\r\n" + b"{" * 70000,
    ],
)
def test_nonsense_is_refused_without_a_fault_and_without_control_characters(data):
    """Whatever listens there, the message is ours."""
    with listening(once(data)) as url, pytest.raises(OverlayError) as caught:
        Api(url, HANG).server_info()

    assert caught.value.next_step and str(caught.value).replace("\n", "").isprintable()


def test_a_long_answer_is_read_up_to_a_bound():
    """Memory is not the other side's to fill: this one is longer than any, and then stands still.

    Whoever read on would have no answer within its patience: another error.
    """
    read = threading.Event()

    def answer(client: socket.socket) -> None:
        client.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (20 << 20))
        read.wait(HANG)

    with listening(answer) as url, pytest.raises(OverlayError, match="does not answer like SGLang"):
        Api(url, HANG).server_info()
    read.set()


def test_a_kept_connection_that_the_server_has_closed_is_opened_again():
    """A server may close a connection that was idle; only a fresh one that hangs up is a fault."""
    body = b'{"speculative_algorithm": null}'
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    with listening(once(answer)) as url:
        connection = Api(url, HANG).connection()
        found = [connection.send("GET", "/server_info", None, HANG) for _ in range(3)]

    assert found == [(200, body)] * 3


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("LOCALHOST.", True),
        ("0.0.0.0", True),
        ("::", True),
        ("10.0.0.1", False),
        ("localhost.example.com", False),
        ("gpu1", False),
        ("", False),
    ],
)
def test_the_loopback_device_is_told_from_other_addresses(address, loopback):
    """What only the host itself reaches is asked through SSH, everything else directly."""
    assert is_loopback(address) == loopback


def test_a_key_travels_open_only_without_tls_and_beyond_this_machine():
    """What is warned of."""
    assert travels_open("http://gpu1:30000")
    assert not travels_open("https://gpu1:30000") and not travels_open("http://127.0.0.1:1")


def test_a_key_is_not_in_the_words_for_an_api():
    """A traceback or a log shows the object."""
    assert "hush" not in repr(Api("http://127.0.0.1:1", 1.0, "hush"))
