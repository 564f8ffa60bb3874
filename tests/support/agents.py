# SPDX-License-Identifier: Apache-2.0
"""Agents with a fault: the real modules, run from memory as on a host, with one function that goes wrong."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.waiting import hold

from ddtree_overlay.hosts import protocol


if TYPE_CHECKING:
    import pytest


#: Does something at the nth call of a function of the agent; `a` are that call's arguments.
_DEADLY = """
{source}
_real, _left = _m.{function}, [{count}]
def _deadly(*a, **k):
    _left[0] -= 1
    if not _left[0]:
        {action}
    return _real(*a, **k)
_m.{function} = _deadly
"""
KILL = "import os; os.kill(os.getpid(), 9)"
FULL = "raise OSError(28, 'No space left on device')"


def standing_still(folder: Path) -> str:
    """An action that makes the file `there` in `folder` and goes on once there is a file `go` as well."""
    return f"exec({hold(folder / 'there', folder / 'go')!r})"


@contextlib.contextmanager
def sabotaged(
    monkeypatch: pytest.MonkeyPatch, module: str, function: str, count: int, action: str = KILL
) -> Iterator[None]:
    """Every agent that is started meanwhile does `action` at the nth call of a function."""
    source = f"from .{module} import Store as _m" if module == "store" else f"from . import {module} as _m"
    with _altered(monkeypatch, _DEADLY.format(source=source, function=function, count=count, action=action)):
        yield


#: Writes a line to a file when a function is entered and when it is left.
_LOGGED = """
from . import {module} as _m
import os as _os
_real = _m.{function}
def _line(word):
    fd = _os.open({path!r}, _os.O_WRONLY | _os.O_CREAT | _os.O_APPEND, 0o644)
    _os.write(fd, f"{{word}} {{_os.getpid()}}\\n".encode())
    _os.close(fd)
def _logging(*a, **k):
    _line("begin")
    try:
        return _real(*a, **k)
    finally:
        _line("end")
_m.{function} = _logging
"""


@contextlib.contextmanager
def logged(monkeypatch: pytest.MonkeyPatch, module: str, function: str, path: Path) -> Iterator[None]:
    """Every agent that is started meanwhile writes `begin PID` and `end PID` around a function to `path`."""
    with _altered(monkeypatch, _LOGGED.format(module=module, function=function, path=str(path))):
        yield


@contextlib.contextmanager
def _altered(monkeypatch: pytest.MonkeyPatch, code: str) -> Iterator[None]:
    loader, modules = protocol._agent_source.__wrapped__()
    sources = json.loads(modules)
    sources["agent"] += code
    with monkeypatch.context() as patch:
        patch.setattr(protocol, "_agent_source", lambda: (loader, json.dumps(sources).encode()))
        yield
