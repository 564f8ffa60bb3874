# SPDX-License-Identifier: Apache-2.0
"""Engines of the decoding benchmark that die, hang or never start: each is told apart, ended, and its log is kept."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest


sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import decode_engines
from decode_engines import EngineEndedError, Started


#: In the place of the interpreter: it is called with `decode_engine.py`, the job and the socket.
STUB = """#!{python} -IS
import json, os, socket, subprocess, sys, time
name = sys.argv[2]
print("the log of", name, flush=True)
if "never" in name:
    time.sleep(600)
if "broken" in name:
    sys.exit(3)
channel = socket.socket(fileno=int(sys.argv[3]))
subprocess.Popen(["sleep", "600"])
channel.sendall(json.dumps({{"start_s": 1.0, "info": {{}}}}).encode() + b"\\n")
for line in channel.makefile("r"):
    asked = json.loads(line)
    if asked == "die":
        os._exit(5)
    if asked == "hang":
        time.sleep(600)
    channel.sendall(json.dumps({{"asked": asked}}).encode() + b"\\n")
"""


@pytest.fixture
def options(tmp_path: Path) -> argparse.Namespace:
    stub = tmp_path / "python"
    stub.write_text(STUB.format(python=sys.executable))
    stub.chmod(0o755)
    return argparse.Namespace(python=str(stub), cpu=True, site=tmp_path, logs=tmp_path / "logs")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that never comes is waited for no longer than it takes to see that."""
    monkeypatch.setattr(decode_engines, "LEAST", 0.05)


def start(options: argparse.Namespace, tmp_path: Path, *names: str) -> Started:
    jobs: dict[str, dict[str, Any]] = {name: {} for name in names}
    return Started(options, tmp_path, jobs, time.monotonic() + 300)


def gone(group: int) -> bool:
    """Whether a group of processes has ended; its last one waits a moment to be reaped."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_those_that_start_are_kept(options: argparse.Namespace, tmp_path: Path) -> None:
    """One that ends at once and one that is never ready cost no other."""
    with start(options, tmp_path, "never", "good", "broken") as started:
        started.engines["never"].end = 0  # its time is over; the others have all that a slow machine needs
        failures = {failure.engine: str(failure) for failure in started.wait(120)}
        assert set(started.engines) == {"good"}
        assert failures["broken"].startswith("engine broken ended with 3; the end of its log:\nthe log of")
        assert failures["never"].startswith("engine never gave no answer in time")
        assert started.engines["good"].ask({"a": 1}) == {"asked": {"a": 1}}
    assert (tmp_path / "logs/broken.log").read_text().startswith("the log of")


@pytest.mark.parametrize(
    ("way", "seconds", "said"), [("die", 60, "ended with 5"), ("hang", 0.1, "gave no answer in time")]
)
def test_one_that_dies_or_hangs_is_ended_with_all_it_started(
    options: argparse.Namespace, tmp_path: Path, way: str, seconds: float, said: str
) -> None:
    """And asking it again says the same."""
    with start(options, tmp_path, "one") as started:
        assert started.wait(120) == []
        engine = started.engines["one"]
        for _ in range(2):
            with pytest.raises(EngineEndedError, match=said):
                engine.ask(way, seconds)  # type: ignore[arg-type]
        started.give_up(EngineEndedError("one", said))
        assert started.engines == {}
        assert gone(engine.process.pid)


def test_no_answer_is_waited_for_beyond_the_end_of_the_run(options: argparse.Namespace, tmp_path: Path) -> None:
    """Whatever patience was asked for."""
    with start(options, tmp_path, "one") as started:
        assert started.wait(120) == []
        begin = time.monotonic()
        started.engines["one"].end = begin + 0.1
        with pytest.raises(EngineEndedError, match="gave no answer in time"):
            started.engines["one"].ask("hang", 500)  # type: ignore[arg-type]
        assert time.monotonic() - begin < 100
