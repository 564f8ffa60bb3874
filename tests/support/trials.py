# SPDX-License-Identifier: Apache-2.0
"""Pushes with a restart against a `Server`, and what has become of them on the host."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.servers import Server
from tests.support.trees import listing
from tests.support.waiting import HANG, until

from ddtree_overlay import deploy, proving
from ddtree_overlay.config import Host
from ddtree_overlay.errors import (
    OverlayError,
)
from ddtree_overlay.hosts.transport import open_transport
from ddtree_overlay.plans import Deployment
from ddtree_overlay.remote import lock


def tree(server: Server) -> dict[str, str]:
    found = listing(server.install.root)
    return {path: what for path, what in found.items() if "__pycache__" not in path}


def push(host: Host, server: Server, mode: str = "well", mark: str = "", *, tell: Callable[[str], None] = print) -> Any:
    bundle, files = server.overlay(mode, mark)
    with open_transport(host) as transport:
        plan = deploy.plan_push(transport, bundle, files)
        return proving.push(transport, plan, files, operator="alice", progress=tell)


def failed(host: Host, server: Server, kind: type[OverlayError], mode: str = "well", mark: str = "") -> OverlayError:
    with pytest.raises(kind) as caught:
        push(host, server, mode, mark)
    return caught.value


def history(host: Host) -> list[Deployment]:
    with open_transport(host) as transport:
        return deploy.history(transport)


def states(host: Host) -> list[tuple[str, str, bool, bool]]:
    return [(d.id, d.state, d.current, d.undone is not None) for d in history(host)]


def in_background(host: Host, server: Server, mode: str, mark: str = "") -> threading.Thread:
    """A push by somebody whose connection may be cut; what becomes of it there does not matter."""

    def run() -> None:
        with contextlib.suppress(OverlayError):
            push(host, server, mode, mark)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def ended(thread: threading.Thread, server: Server) -> None:
    """Wait for a push of `in_background` and for what it has started on the host."""
    thread.join(HANG)
    assert not thread.is_alive()
    idle(server)


def idle(server: Server) -> None:
    """Wait until nobody changes the host: a state is seen before whoever made it has let go of the lock."""
    until(lambda: not agents(server) and lock.holder(server.install.state) is None)


def kill_agents(server: Server) -> None:
    for pid in agents(server):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    idle(server)


def trial(server: Server) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads((server.install.state / "trial.json").read_bytes()))
    return {}


def phase(server: Server) -> tuple[str, str] | None:
    """Of what the host is trying, and how far it is; None when nothing is tried."""
    found = trial(server)
    return (found["id"], found["phase"]) if found else None


def agents(server: Server) -> list[int]:
    """The agents that run for this install."""
    python = str(server.install.python).encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if words[0] == python and any(w.startswith(b"ddtree-") for w in words):
                found.append(int(path.parent.name))
    return found


def command_lines() -> list[bytes]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes())
    return found
