# SPDX-License-Identifier: Apache-2.0
"""`tune` as a command, against servers that answer well, badly or not at all; a real SGLang is in tests/engine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.commands import Ran, begin, clean_environ, heard, outcome
from tests.support.relay import Relay
from tests.support.sshd import new_lines
from tests.support.tunable import ARMS, INFO, QUICK, SHORT, Tunable, certificate
from tests.support.waiting import HANG, no_hang, until


#: Seconds of a request that is slower than others on a busy machine as well, in each round.
CLEARLY = 0.3


@pytest.fixture
def tunable():
    """A server on which 7 is the fastest tree at any load, and what `auto` does still faster."""
    with Tunable(seconds={"chain": 0.06, "4": 0.05, "7": 0.03, "16": 0.07, "auto": 0.015}) as server:
        yield server


def result(done: Ran, code: int = 0) -> dict[str, Any]:
    assert done.code == code, done
    return json.loads(done.out)


def test_a_measurement_compares_all_arms_and_recommends_flags(run, tunable):
    """Every arm at every concurrency, the gain over the chain, and one line of flags."""
    tunable.seconds["chain"] = CLEARLY
    done = run("tune", "--url", tunable.url, *QUICK)

    assert done.code == 0, done
    rows = re.findall(r"^ {2} *(\d+)? +(\w+)(?: \*)? +[\d.]+  \[", done.out, re.MULTILINE)
    assert rows == [(first, arm) for c in "14" for first, arm in zip((c, *[""] * 4), ARMS, strict=True)]
    assert "recommended: --speculative-ddtree-budget auto --speculative-ddtree-budgets 4,7,16" in done.out
    assert "1 of 40: warm-up, 1 at a time: chain" in done.err


def test_the_result_as_json_says_everything_that_the_table_says(run, tunable):
    """One object on stdout, as docs/tune.md describes it."""
    tunable.seconds["chain"] = CLEARLY
    value = result(run("tune", "--url", tunable.url, *QUICK, "--json"))

    assert (value["schema"], value["command"], value["ok"], value["exit_code"]) == (1, "tune", True, 0)
    assert value["server"]["budgets"] == [4, 7, 16] and value["server"]["overrides"] == ["chain", 4, 7, 16]
    assert value["settings"]["requests"] == {"1": 4, "4": 8}
    cell = next(c for c in value["cells"] if (c["arm"], c["concurrency"]) == ("7", 4))
    assert cell["rounds"] == 3 and cell["requests"] == 24 and cell["errors"] == {}
    assert cell["against_chain"]["verdict"] == "faster" and cell["against_chain"]["min"] > 1
    assert cell["latency_s"]["p50"] >= 0.03 and cell["accept_length"] == pytest.approx(128 / 42, rel=1e-3)
    assert value["recommendation"]["arm"] == "auto" and value["fault"] is None and value["not_measured"] == []


def test_what_auto_chose_is_shown_and_an_arm_that_was_something_else_is_named(run, tunable):
    """By the steps that the server counts: an arm without room for it must not pass for a measured one."""
    tunable.instead["16"] = "4"
    done = run("tune", "--url", tunable.url, *SHORT)

    assert done.code == 0, done
    assert "auto at 1 at a time: 7 100%" in done.out
    assert "16 at 1 at a time is something else: its steps were 4 100%" in done.out
    assert "7 at 1 at a time is" not in done.out


def test_a_server_that_counts_no_steps_is_believed(run, tunable):
    """An overlay that does not say what it drafted with."""
    tunable.steps = None
    value = result(run("tune", "--url", tunable.url, *SHORT, "--json"))

    assert {tuple(c["steps"]) for c in value["cells"]} == {()}


def test_as_many_requests_are_in_flight_as_were_asked_for(run, tunable):
    """Never more, and the asked number is reached: one arm at a time."""
    tunable.seconds = dict.fromkeys(ARMS, CLEARLY)
    result(run("tune", "--url", tunable.url, *QUICK, "--arms", "7,chain", "--concurrency", "3", "--json"))

    assert max(flying for _, flying in tunable.seen) == 3
    assert {arm for arm, _ in tunable.seen} == {"7", "chain", "auto"}  # the prompts are tried with what is served
    changes = sum(a[0] != b[0] for a, b in zip(tunable.seen, tunable.seen[1:], strict=False))
    assert changes <= 1 + 2 * 4


def test_a_plot_is_written_where_it_is_asked_for(run, tunable, workspace):
    """A PNG, at its default place in the workspace or where --plot says."""
    pytest.importorskip("matplotlib")
    short = (*SHORT[:-1], "--arms", "chain,7")
    named = result(run("tune", "--url", tunable.url, *short, "--plot", "my.svg", "--json"))
    default = result(run("tune", "--url", tunable.url, *short, "--json"))

    assert named["plot"] == "my.svg" and (workspace / "my.svg").read_bytes().startswith(b"<?xml")
    assert Path(default["plot"]) == workspace / f"tune-127.0.0.1-{tunable.port}.png"
    assert Path(default["plot"]).read_bytes().startswith(b"\x89PNG")
    assert not list(workspace.glob(".tune-*"))


def test_without_matplotlib_the_table_is_all_there_is(run, tunable, tmp_path):
    """A plot that was asked for is refused at once, with the way to have it; one that was not is only missed."""
    (tmp_path / "shadow").mkdir()
    (tmp_path / "shadow/sitecustomize.py").write_text("import sys\nsys.modules['matplotlib'] = None\n")
    path = {"PYTHONPATH": str(tmp_path / "shadow")}

    asked = run("tune", "--url", tunable.url, *SHORT[:-1], "--plot", "x.png", **path)
    assert asked.code == 2 and "pip install 'ddtree-overlay[plot]'" in asked.err and not tunable.seen
    plain = run("tune", "--url", tunable.url, *SHORT[:-1], **path)
    assert plain.code == 0 and "warning: no plot" in plain.err and "at a time" in plain.out


def test_one_budget_is_measured_and_the_restart_that_would_compare_is_named(run):
    """No override is sent: such a server may be of an earlier overlay."""
    with Tunable(info=INFO | {"speculative_ddtree_budget": 16, "speculative_ddtree_budgets": None}) as server:
        done = run("tune", "--url", server.url, *SHORT)

    assert done.code == 0 and {arm for arm, _ in server.seen} == {"auto"}  # which is what no override looks like
    assert "no recommendation: this server has the budget 16 only" in done.out
    assert "--speculative-ddtree-budgets 4,7,8,32,64" in done.out


def test_a_server_that_does_not_say_how_busy_it_is_is_measured_with_a_warning(run, tunable):
    """Unknown is not idle."""
    tunable.load = None
    done = run("tune", "--url", tunable.url, *SHORT)

    assert done.code == 0 and "does not say how busy it is" in done.err


def test_a_run_beside_others_requests_is_left_out_and_said(run, tunable):
    """A visitor who stays for three seconds once he was seen: the run that he was seen with does not count (exit 3)."""

    def visit() -> None:
        until(lambda: len(tunable.seen) >= 40)
        asked = tunable.asked
        tunable.load = 2
        # The first answer may have been on its way.
        until(lambda: tunable.asked > asked + 1)
        time.sleep(3)
        tunable.load = 0

    thread = threading.Thread(target=visit)
    thread.start()
    value = result(run("tune", "--url", tunable.url, *QUICK, "--arms", "7,chain,16", "--json"), 3)
    thread.join()

    assert value["disturbed"] >= 1 and value["not_measured"] and value["cells"]


def test_an_arm_that_the_server_refuses_does_not_stop_the_others(run, tunable):
    """Its error is printed with its number, without control characters; exit 3."""
    tunable.refuses = ("16",)
    done = run("tune", "--url", tunable.url, *QUICK, "--color", "never")

    assert done.code == 3, done
    assert "requests failed: /generate answers 400: no lane for 16" in done.out and "\x1b" not in done.out
    assert "not measured: 1 at a time, 16: 3 rounds" in done.out
    assert "recommended: " in done.out


def test_a_server_that_dies_leaves_the_table_of_what_was_measured(run, tunable):
    """Exit 8 as for any lost connection, with the error on stderr and the table on stdout."""
    tunable.dies_after = 80
    value = result(run("tune", "--url", tunable.url, *QUICK, "--json"), 8)

    assert value["cells"] and not value["ok"] and value["fault"]["error"] == "ConnectionFailedError"
    assert value["not_measured"]


def test_a_connection_that_stalls_half_way_comes_to_an_end(run, tunable):
    """A relay that holds everything back after some bytes: no hang, and what was measured is shown."""
    with no_hang(3 * HANG), Relay(tunable.port, down=20000) as relay:
        done = run("tune", "--url", f"http://127.0.0.1:{relay.port}", *QUICK, "--timeout", "5")

    assert done.code == 8 and "no answer from" in done.err and "at a time" in done.out


def test_the_bound_on_the_time_holds_and_what_it_cost_is_said(run, tunable):
    """Rounds that were not measured are named; a run that was cut off is not counted."""
    tunable.seconds = dict.fromkeys(ARMS, 0.15)
    words = ("tune", "--url", tunable.url, "--no-plot", "--concurrency", "1", "--rounds", "100", "--requests", "4")
    with no_hang(2 * HANG):  # all of it would take five minutes
        done = run(*words, "--seconds", "15")

    assert done.code == 0 and "ended early: the time is up" in done.out and "not measured: 1 at a time" in done.out


@pytest.mark.parametrize("late", [True, False])
def test_an_interrupt_leaves_the_table_of_what_was_measured(workspace, tmp_path, tunable, late):
    """Ctrl-C ends the requests in flight; exit 130, with the table, also when it is still empty."""
    words = ["tune", "--url", tunable.url, "--no-plot", "--concurrency", "1", "--rounds", "100", "--json"]
    tunable.seconds["16"] = 0.2
    process = begin(workspace, tmp_path / "home", *words)
    said = heard(process, "warm-up")
    if late:
        while not re.search(r"round ([2-9]|\d\d) of", said):
            said = heard(process, "round ")
    process.send_signal(signal.SIGINT)
    done = outcome(process)
    value = done.json

    assert done.code == 130 and value["exit_code"] == 130 and value["stopped"] == "interrupted"
    assert bool(value["cells"]) == late and value["not_measured"]
    until(lambda: not tunable.flying)


def test_the_host_of_deploy_toml_is_reached_through_ssh(run, workspace, tunable, sshd):
    """A server on the host's loopback device: every request goes through the connection, and no port is opened here."""
    table = sshd.toml("gpu", "python3")
    (workspace / "deploy.toml").write_text(f'{table}\n[hosts.gpu.health]\nurl = "{tunable.url}"\n')
    before = sshd.log()
    value = result(run("tune", "--host", "gpu", *QUICK, "--json"))

    assert value["target"] == "gpu" and len(value["cells"]) == 10 and value["errors"] == {}
    assert new_lines(sshd, before).count("Accepted publickey") == 1


def test_tls_is_spoken_through_the_tunnel(run, workspace, tmp_path, sshd):
    """The host that forwards is not trusted with the answer either: the certificate is verified at this end."""
    files = certificate(tmp_path)
    with Tunable(tls=files) as server:
        table = sshd.toml("gpu", "python3")
        (workspace / "deploy.toml").write_text(f'{table}\n[hosts.gpu.health]\nurl = "{server.url}"\n')
        trusted = run("tune", "--host", "gpu", *SHORT, SSL_CERT_FILE=str(files[0]))
        refused = run("tune", "--host", "gpu", *SHORT)

    assert (trusted.code, refused.code) == (0, 8) and "certificate is not trusted" in refused.err


def test_an_ssh_connection_that_breaks_leaves_what_was_measured(run, workspace, tunable, sshd):
    """The network goes away half-way."""
    with Relay(sshd.port, up=60000, drop=True) as relay:
        table = sshd.toml("gpu", "python3").replace(f"port = {sshd.port}", f"port = {relay.port}")
        known = workspace / "known_hosts"
        known.write_text(sshd.known_hosts.read_text().replace(str(sshd.port), str(relay.port)))
        table = table.replace(str(sshd.known_hosts), str(known))
        (workspace / "deploy.toml").write_text(f'{table}\n[hosts.gpu.health]\nurl = "{tunable.url}"\n')
        value = result(run("tune", "--host", "gpu", "--timeout", "30", *QUICK, "--rounds", "9", "--json"), 8)

    assert value["cells"] and "SSH connection was lost" in json.dumps(value)


def test_a_bar_is_drawn_on_a_terminal_and_gone_at_the_end(workspace, tmp_path, tunable):
    """On a terminal one line that moves, not one line a run."""
    tunable.seconds = dict.fromkeys(ARMS, CLEARLY)  # it is drawn ten times a second
    pty = pytest.importorskip("pty")
    leader, follower = pty.openpty()
    words = ["tune", "--url", tunable.url, "--no-plot", "--concurrency", "1", "--rounds", "1", "--requests", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "ddtree_overlay", *words],
        cwd=workspace,
        env=clean_environ(tmp_path / "home") | {"TERM": "xterm"},
        stdout=subprocess.PIPE,
        stderr=follower,
        text=True,
    )
    os.close(follower)
    out, _ = process.communicate(timeout=4 * HANG)
    seen = b""
    while True:
        try:
            piece = os.read(leader, 65536)
        except OSError:
            break
        seen += piece
        if not piece:
            break
    os.close(leader)

    assert process.returncode == 0 and "at a time" in out
    assert b"round 1 of 1, 1 at a time: " in seen and b"10/10" not in out.encode()
    assert b"\x1b[2K" in seen or b"\x1b[1A" in seen  # the line is rewritten
