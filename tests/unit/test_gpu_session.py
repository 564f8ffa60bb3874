# SPDX-License-Identifier: Apache-2.0
"""`scripts/gpu_session` on commands that stand in for a GPU's: whatever one does, the others and a table remain."""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.waiting import until


sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import decode_arms


PROJECT = Path(__file__).resolve().parents[2]
SCRIPT = PROJECT / "scripts/gpu_session"


@pytest.fixture(scope="module")
def session() -> Any:
    """The script as a module."""
    loader = importlib.machinery.SourceFileLoader("gpu_session", str(SCRIPT))
    spec = importlib.util.spec_from_loader("gpu_session", loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_session"] = module
    loader.exec_module(module)
    return module


@pytest.fixture
def options(tmp_path: Path) -> argparse.Namespace:
    return argparse.Namespace(
        out=tmp_path, cpu=True, limits=dict.fromkeys(("kernels", "decode", "prove", "small", "calibration"), 200)
    )


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def listed(*flags: str) -> list[str]:
    command = [sys.executable, str(SCRIPT), "--list", "--pair", "PAIR", "--out", "OUT", *flags]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=200).stdout.splitlines()


def test_a_step_of_one_release_can_be_asked_for_and_given_flags(tmp_path: Path) -> None:
    """In the order that was asked for; a name without a release means all of them."""
    sites = []
    for release in ("0.5.11", "0.5.17"):
        (tmp_path / release / f"sglang-{release}.dist-info").mkdir(parents=True)
        sites += ["--site", str(tmp_path / release)]
    lines = listed(*sites, "--steps", "decode-0.5.17,kernels,prove", "--with", "prove", "--budgets 64")
    assert [line.partition(":")[0] for line in lines] == ["0.5.17-8b", "kernels", "prove-0.5.11", "prove-0.5.17"]
    assert lines[2].endswith("graphs steps lanes pages sanitizer --budgets 64")
    lines = listed(*sites, "--steps", "small-0.5.11", "--small-pair", "tiny")
    assert [line.partition(":")[0] for line in lines] == ["0.5.11-PAIR-calibration", "0.5.11-tiny-calibration"]
    lines = listed(*sites, "--steps", "calibration-0.5.17", "--small-pair", "tiny")
    assert [line.partition(":")[0] for line in lines] == ["0.5.17-PAIR-8b-calibration", "0.5.17-tiny-8b-calibration"]
    assert all("--padded-like 8b" in line and "--turn" not in line for line in lines)
    asked = {int(name) for name in lines[0].partition("--arms ")[2].split()[0].split(",") if name.isdecimal()}
    assert asked and asked <= set(decode_arms.default_lanes(16)), "arms that no engine of this step serves"


def test_a_step_that_does_not_exist_is_refused() -> None:
    """Before anything is patched."""
    command = [sys.executable, str(SCRIPT), "--site", "S", "--pair", "P", "--out", "O", "--steps", "decode-0.4"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2
    assert "decode-0.4: there are the steps" in done.stderr


@pytest.mark.parametrize(
    ("codes", "result"), [((0, 0), "ok"), ((0, 3), "short"), ((1, 3), "FAILED"), ((0, -9), "FAILED")]
)
def test_a_step_is_what_the_worst_of_its_commands_is(
    session: Any, options: argparse.Namespace, codes: tuple[int, int], result: str
) -> None:
    """Commands of a step run beside each other, and what each says is kept."""
    ends = [f"print('said {code}', flush=True); end({code})" for code in codes]
    ends = [f"import os\nend = lambda code: os.kill(os.getpid(), 9) if code < 0 else exit(code)\n{end}" for end in ends]
    step = session.Step("decode-1", "decode", [(f"c{at}", python(end)) for at, end in enumerate(ends)])
    session.run(options, step, 1000)
    assert step.result == result
    assert [word for word in step.said if word.startswith("said")] == [f"said {code}" for code in codes]


def test_a_command_that_hangs_is_ended_and_keeps_what_it_wrote(
    session: Any, options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that ignores a SIGTERM."""
    monkeypatch.setattr(session, "GRACE", 0)
    monkeypatch.setattr(session, "LAST_GRACE", 1)
    options.limits["decode"] = 1
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('half', flush=True); time.sleep(600)"
    begin = subprocess.Popen

    def begun(*words: Any, **more: Any) -> subprocess.Popen[bytes]:
        """A command that has said something: its limit may be over before a busy machine has got it that far."""
        process = begin(*words, **more)
        until((options.out / "one.log").read_text)
        return process

    monkeypatch.setattr(subprocess, "Popen", begun)
    step = session.Step("decode-1", "decode", [("one", python(code))])
    start = time.monotonic()
    session.run(options, step, 1000)
    assert time.monotonic() - start < 250
    assert (step.result, step.said) == ("FAILED", ["one: exit -1", "half"])


def test_a_step_without_time_is_not_begun(session: Any, options: argparse.Namespace) -> None:
    """It would be cut off in its start."""
    options.cpu = False
    step = session.Step("decode-1", "decode", [("one", python("exit(1)"))])
    session.run(options, step, 200)
    assert (step.result, step.said) == ("not run", ["200 s were left"])


def test_limits_are_passed_on(session: Any, options: argparse.Namespace) -> None:
    """And what a pair may measure of them, when several take turns."""
    options.limits["small"] = 330
    show = python("import sys; print(*sys.argv[1:])")
    step = session.Step("small-1", "small", [("a", [*show, "LIMIT", "SHARE"]), ("b", [*show, "x"])])
    session.run(options, step, 1000)
    assert "330 90" in step.said


def test_commands_of_a_step_that_follow_each_other_share_its_time(
    session: Any, options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second begins when the first has ended, and has what that has left."""
    options.limits["calibration"] = 300
    now = iter([0.0, 0.0, 0.0, 0.0, 50.0, 50.0, 50.0, 250.0])
    clock = argparse.Namespace(monotonic=lambda: next(now))
    monkeypatch.setattr(session, "time", clock)
    show = "import pathlib, sys; print(pathlib.Path('{}').exists(), *sys.argv[1:])"
    commands = [(name, [*python(show.format(options.out / "b.log")), "LIMIT"]) for name in "ab"]
    step = session.Step("calibration-1", "calibration", commands, beside=False)
    session.run(options, step, 1000)
    assert [line for line in step.said if "exit" not in line] == ["False 150", "True 250"]
    assert (step.result, step.seconds) == ("ok", 250.0)


def test_what_decides_is_taken_from_the_figures(session: Any, tmp_path: Path) -> None:
    """Verdicts of a benchmark, failed checks of a proof; of what wrote none, the end of the log."""
    verdicts = [{"what": "auto is fast", "passed": False, "figures": "0.9"}]
    (tmp_path / "a.json").write_text(json.dumps({"figures": {"verdicts": verdicts}, "failed": {"ddtree": "log"}}))
    assert session.decisive(tmp_path / "a") == ["NOT SO: auto is fast: 0.9", "FAILED: engine ddtree"]
    row = {"arm": "DDTREE auto", "concurrency": 8, "accept": 1.02, "accept_error": 0.004, "alike": 1.01}
    row |= {"alike_error": 0.006, "tok_s": 1.0, "tok_s_error": 0.008}
    figures = {"verdicts": [], "calibration": [row, row | {"arm": "DDTREE 64"}, row | {"alike_error": None}]}
    (tmp_path / "a.json").write_text(json.dumps({"figures": figures}))
    said = "accept 1.020 ± 0.004, tok_s 1.000 ± 0.008, alike 1.010 ± 0.006"
    assert session.decisive(tmp_path / "a") == [f"auto calibrated / uncalibrated at 8: {said}"]
    rows = [{"part": "graphs", "check": word, "result": word, "figures": ""} for word in ("ok", "FAILED", "ok")]
    (tmp_path / "b.json").write_text(json.dumps({"parts": ["graphs"], "rows": rows}))
    assert session.decisive(tmp_path / "b") == ["2 ok, 1 FAILED", "FAILED: graphs: FAILED"]
    (tmp_path / "c.log").write_text("one\ntwo\nthree\n")
    assert session.decisive(tmp_path / "c") == ["two", "three"]


def test_the_table_is_last(session: Any) -> None:
    """A log that is cut at its front still shows it."""
    step = session.Step("kernels", "kernels", [], result="ok", seconds=12.3, said=["bounds kept"])
    assert session.summary([step], 20.0).splitlines()[-2:] == ["step     result  seconds", "kernels  ok      12"]
