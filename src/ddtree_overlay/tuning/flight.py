# SPDX-License-Identifier: Apache-2.0
"""Requests in flight: a few connections that share one list of requests until all are answered, or the time is up."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddtree_overlay.tuning.cells import Reply
from ddtree_overlay.tuning.client import Api, Connection, NoAnswerError, line
from ddtree_overlay.tuning.served import number


@dataclass(frozen=True, slots=True)
class Flight:
    """What came back, in the order of the requests; `whole` is False when the time was up before all had an answer."""

    seconds: float
    replies: tuple[Reply, ...]
    whole: bool


class Pool:
    """Connections that are kept from one flight to the next; a context manager."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self._connections: list[Connection] = []

    def fly(self, bodies: Sequence[dict[str, Any]], concurrency: int, end: float) -> Flight:
        """Send all requests, `concurrency` at a time, until `end` (of `time.monotonic`).

        Raises:
            KeyboardInterrupt: The user interrupted; what was in flight is ended first.
        """
        width = min(concurrency, len(bodies))
        while len(self._connections) < width:
            self._connections.append(self.api.connection())
        work = _Work(bodies)
        start = time.monotonic()
        mine = self._connections
        threads = [threading.Thread(target=_serve, args=(self.api, mine, i, work), daemon=True) for i in range(width)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                # In short pieces: a wait without end would keep Ctrl-C out on some systems.
                while thread.is_alive() and time.monotonic() < end:
                    thread.join(min(0.5, max(0.01, end - time.monotonic())))
        finally:
            whole = not any(thread.is_alive() for thread in threads)
            if not whole:
                self._cut(work, threads)
        replies = [work.replies.get(i) for i in range(len(bodies))]
        seconds = max(work.ended, default=start) - start
        return Flight(seconds, tuple(r for r in replies if r is not None), whole and None not in replies)

    def _cut(self, work: _Work, threads: Sequence[threading.Thread]) -> None:
        """End what is under way; the server drops requests whose client has gone."""
        work.over.set()
        for connection in self._connections:
            connection.cut()
        for thread in threads:
            thread.join(2.0)
        self.close()

    def close(self) -> None:
        """Drop every connection."""
        # Threads that did not end in time may still hold the old list.
        held, self._connections = self._connections, []
        for connection in held:
            connection.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Work:
    """The requests of a flight, handed out one by one, and their answers."""

    def __init__(self, bodies: Sequence[dict[str, Any]]) -> None:
        self._left = list(enumerate(bodies))[::-1]
        self._lock = threading.Lock()
        self.over = threading.Event()
        self.replies: dict[int, Reply] = {}
        self.ended: list[float] = []

    def take(self) -> tuple[int, dict[str, Any]] | None:
        with self._lock:
            return self._left.pop() if self._left else None

    def put(self, index: int, reply: Reply) -> None:
        with self._lock:
            self.replies[index] = reply
            self.ended.append(time.monotonic())


def _serve(api: Api, connections: list[Connection], number: int, work: _Work) -> None:
    """One of the connections: sends one request after the other."""
    while not work.over.is_set() and (taken := work.take()) is not None:
        index, body = taken
        start = time.monotonic()
        try:
            reply = _reply(connections[number].generate(body, api.seconds), time.monotonic() - start)
        except NoAnswerError as e:
            reply = Reply(time.monotonic() - start, error=str(e))
            connections[number] = api.connection()
        except Exception as e:  # a fault of ours in a thread must not look like an answer that never came
            reply = Reply(time.monotonic() - start, error=f"{type(e).__name__}: {e}"[:200])
        work.put(index, reply)


def _reply(answer: dict[str, Any], seconds: float) -> Reply:
    meta = answer["meta_info"]
    finish = meta.get("finish_reason")
    if isinstance(finish, dict) and finish.get("type") == "abort":
        said = finish.get("message")
        why = line(said) if isinstance(said, str) else "it does not say why"
        return Reply(seconds, error=f"the server aborted it: {why}")
    tokens = number(meta.get("completion_tokens"))
    if tokens is None:
        return Reply(seconds, error="the answer does not say how many tokens it has")
    return Reply(seconds, tokens, number(meta.get("spec_verify_ct")) or 0)
