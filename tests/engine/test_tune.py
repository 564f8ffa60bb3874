# SPDX-License-Identifier: Apache-2.0
"""`tune` against real SGLang servers on the CPU: measuring, an SSH tunnel, an API key, and what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine import harness
from tests.engine.serving import Serving, text_arguments
from tests.support.commands import Ran, clean_environ
from tests.support.sshd import SshServer
from tests.support.sshd_binary import SshdUnavailable


KEY = "open-sesame"
SHORT = ("--rounds", "2", "--requests", "2", "--concurrency", "1,2", "--max-new-tokens", "12", "--no-plot", "--json")
BUDGETS = [4, 7, 16]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tune")


@pytest.fixture(scope="module")
def serving(sites: Any, folder: Path) -> Iterator[Serving]:
    """A server of the second worker with overlap scheduling, several budgets, `auto` and an API key."""
    arguments = text_arguments(
        "DDTREE",
        folder,
        speculative_ddtree_budget="auto",
        speculative_ddtree_budgets=",".join(map(str, BUDGETS)),
        disable_overlap_schedule=False,
        api_key=KEY,
    )
    with Serving.start(sites[harness.SECOND_RELEASE], arguments, folder / "second") as server:
        yield server.wait()


def tune(folder: Path, *options: str, **env: str) -> Ran:
    done = subprocess.run(
        [sys.executable, "-m", "ddtree_overlay", "tune", *options],
        cwd=folder,
        env={**clean_environ(folder), **env},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def test_each_arm_of_a_real_server_is_measured_through_ssh(serving: Serving, folder: Path):
    """Budgets by request, the chain, and `auto`: wider trees accept no less, and the chain no more than its width."""
    try:
        with SshServer.start(folder / "sshd", harness.PROJECT / ".cache") as sshd:
            table = sshd.toml("gpu", "python3") + f'\n[hosts.gpu.health]\nurl = "{serving.url}"\n'
            (folder / "deploy.toml").write_text(table)
            done = tune(folder, "--host", "gpu", *SHORT, "--rounds", "3", "--api-key-env", "KEY", KEY=KEY)
    except SshdUnavailable as e:
        pytest.skip(f"no sshd: {e}")

    assert done.code == 0 and KEY not in done.out + done.err, done
    value = json.loads(done.out)
    assert value["server"]["version"] == harness.SECOND_RELEASE and value["server"]["budgets"] == BUDGETS
    cells = {(c["arm"], c["concurrency"]): c for c in value["cells"]}
    assert set(cells) == {(arm, c) for arm in ("chain", "4", "7", "16", "auto") for c in (1, 2)}
    assert all(c["rounds"] == 3 and not c["errors"] and c["tokens_per_s"]["min"] > 0 for c in cells.values())
    # What the server counted: each arm was drafted as it asks, and `auto` with something that there is.
    asked = [c["steps"].get(c["arm"], 0) / sum(c["steps"].values()) for c in cells.values() if c["arm"] != "auto"]
    assert min(asked) > 0.9
    assert all(c["steps"] for c in cells.values())
    for concurrency in (1, 2):
        chain, four, seven, sixteen = (cells[a, concurrency]["accept_length"] for a in ("chain", "4", "7", "16"))
        assert 1 <= four <= seven <= sixteen and chain <= seven
        # A tree of four nodes cannot accept more than four of them and the token behind.
        assert four <= 5
    assert value["recommendation"]["flags"].startswith("--speculative-ddtree-budget ")


def test_a_server_with_an_api_key_refuses_who_has_none(serving: Serving, folder: Path):
    """Exit 8, and nothing was generated."""
    done = tune(folder, "--url", serving.url, *SHORT)

    assert done.code == 8 and "refuses to answer without an API key" in done.err


def test_a_prompt_that_the_server_cannot_take_is_named_before_anything_is_measured(serving: Serving, folder: Path):
    """Longer than the context: the server's own words."""
    (folder / "long.json").write_text(json.dumps(["short", "x" * 300]))
    done = tune(folder, "--url", serving.url, *SHORT, "--prompts", "long.json", "--api-key-env", "KEY", KEY=KEY)

    assert done.code == 1 and "long.json, item 2" in done.err and "longer than the model's context" in done.err


def test_a_real_server_that_dies_leaves_what_was_measured(sites: Any, folder: Path):
    """The first worker with one budget: measured without an override, killed while requests are in flight."""
    arguments = text_arguments("DDTREE", folder, speculative_ddtree_budget=16)
    with Serving.start(sites[harness.RELEASE], arguments, folder / "first") as server:
        server.wait()
        process = subprocess.Popen(
            [sys.executable, "-m", "ddtree_overlay", "tune", "--url", server.url, *SHORT, "--rounds", "100"],
            cwd=folder,
            env=clean_environ(folder),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        line = ""
        # A line every few seconds: any round but the first two will do.
        while not re.search(r"round (?![12] )\d+ of", line):
            line = process.stderr.readline()
            assert line, "it ended by itself"
        server.kill()
        out, _ = process.communicate(timeout=1000)

    value = json.loads(out)
    assert process.returncode == 8 and value["fault"]["error"] == "ConnectionFailedError"
    assert {c["arm"] for c in value["cells"]} == {"16"} and min(c["rounds"] for c in value["cells"]) >= 2
    assert "this server has the budget 16 only" in value["recommendation"]["why"]


@pytest.mark.parametrize(("algorithm", "says"), [("DFLASH", "but DFLASH"), (None, "but no speculative decoding")])
def test_a_real_server_without_ddtree_is_refused(sites: Any, folder: Path, algorithm: str | None, says: str):
    """Patched, but started with another algorithm: what it takes is named."""
    arguments = text_arguments(algorithm, folder)
    with Serving.start(sites[harness.RELEASE], arguments, folder / f"other-{algorithm}") as server:
        server.wait()
        done = tune(folder, "--url", server.url, *SHORT)

    assert done.code == 1 and says in done.err and "--speculative-algorithm DDTREE" in done.err
