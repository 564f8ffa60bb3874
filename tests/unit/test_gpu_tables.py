# SPDX-License-Identifier: Apache-2.0
"""Pages of runs on a GPU: `scripts/gpu_table` says what a run has shown, and what it did not come to."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from gpu_proofs import tables


PROJECT = Path(__file__).resolve().parents[2]
LOG = """$ python -m compileall SITE  [2.2 s]
    69 s  engine graphs-plain: 69 s
    84 s  ok       steps: no step waits for the device: 152 steps, 152 with a graph, planted wait: seen
    85 s  FAILED   lanes: width 5: every row is finite: 12 | 13 rows
    86 s           lanes: one lane: started in 50.3 s
    86 s             budget  requests
"""


def page_of(tmp_path: Path, text: str) -> list[str]:
    (tmp_path / "file").write_text(text)
    return tables.markdown(tables.read(tmp_path / "file"), "title", []).splitlines()


def test_a_run_that_was_ended_says_what_it_did_not_come_to(tmp_path: Path) -> None:
    """A part whose engines ran and that has no check is named: its absence must not look like success."""
    page = page_of(tmp_path, LOG)
    assert "- ended from outside after 2 checks: 1 ok, 1 FAILED; no check of graphs" in page
    assert "| lanes | FAILED | width 5: every row is finite: 12 \\| 13 rows |" in page
    assert page[page.index("```text") :] == [
        "```text",
        "lanes: one lane: started in 50.3 s",
        "  budget  requests",
        "```",
    ]


def test_the_final_table_ends_a_run_and_is_not_counted_again(tmp_path: Path) -> None:
    end = "\ngpu_prove steps lanes, budget 16: 112 s\npart   check   result  figures\nsteps  no step  ok  152 steps\n"
    page = page_of(tmp_path, LOG.replace("engine graphs", "engine steps") + end)
    assert "- 1 ok, 1 FAILED" in page


def test_rows_and_facts_of_a_json_become_tables(tmp_path: Path) -> None:
    """In the order of the parts that were asked for; of gaps the page tells how many were ties."""
    rows = [{"part": part, "check": "a check", "result": "ok", "figures": f"{part}: 1"} for part in ("lanes", "ranks")]
    facts = {
        "gaps": {"DDTREE": [0.0, 0.125, 0.0], "plain": []},
        "gathered": [{"bytes": 7740, "us": 121.411, "equal": True}],
        "pair": [3.4285714, 3.5],
        "launches": {"median": {"DFLASH": 26}},
        "noise": {},
    }
    about = {"command": "scripts/gpu_prove ranks --site SITE"}
    run = {"about": about, "parts": ["ranks", "lanes"], "rows": rows, "facts": {"ranks": facts}}
    page = page_of(tmp_path, json.dumps(run))
    assert page[2:4] == ["- command: scripts/gpu_prove ranks --site SITE", "- 2 ok"]
    assert page.index("| ranks | ok | a check: ranks: 1 |") < page.index("| lanes | ok | a check: lanes: 1 |")
    for line in ("| DDTREE | 3 | 2 | 0.125 |", "| plain | 0 | 0 | 0 |", "| 7740 | 121.4 | True |", "| 3.429, 3.5 |"):
        assert line in page
    assert '| {"median": {"DFLASH": 26}} |' in page


def test_a_page_holds_no_record_of_every_step(tmp_path: Path) -> None:
    """Thousands of rows, which the checks sum up; the JSON keeps them."""
    facts = {"lanes": {"stepswidth 5: ": [{"batch": 1, "gaps": []}], "noise": {"bound": 0.25}}}
    page = page_of(tmp_path, json.dumps({"about": {}, "parts": ["lanes"], "rows": [], "facts": facts}))
    assert [line for line in page if line.startswith("## ")] == ["## lanes: noise"]


def test_times_of_kernels_are_sorted(tmp_path: Path) -> None:
    """They are taken in another order, those that have a bound first."""
    rounds = [{"batch": batch, "budget": budget, "tree": 8.25} for budget in (64, 16) for batch in (1, 32)]
    heads = [{"batch": 1, "k": k, "head": 1700.06} for k in (64, 16)]
    page = page_of(tmp_path, json.dumps({"machine": "GPU", "date": "2026", "rounds": rounds, "heads": heads}))
    assert [line for line in page if line.endswith("8.2 |")][:2] == ["| 1 | 16 | 8.2 |", "| 32 | 16 | 8.2 |"]
    assert page[-2:] == ["| 1 | 16 | 1700.1 |", "| 1 | 64 | 1700.1 |"]


def test_a_command_names_folders_as_anybody_would() -> None:
    names = {"SITE": Path("/home/me/site"), "OUT": None}
    assert tables.command_of(["gpu_prove", "--site", "/home/me/site/"], names) == "gpu_prove --site SITE"


def test_the_script_writes_what_it_would_print(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(LOG)
    command = [sys.executable, PROJECT / "scripts/gpu_table", tmp_path / "log", "--title", "T", "--about", "commit 1"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=200).stdout
    subprocess.run([*command, "--out", tmp_path / "page.md"], check=True, timeout=200)
    assert (tmp_path / "page.md").read_text() == printed
    assert printed.startswith("# T\n\n- commit 1\n- ended from outside")


def test_gpu_prove_writes_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what was run on what: whoever reads a figure later has nobody to ask."""
    loader = importlib.machinery.SourceFileLoader("gpu_prove", str(PROJECT / "scripts/gpu_prove"))
    script: Any = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu_prove", loader))
    loader.exec_module(script)
    monkeypatch.setitem(script.PARTS, "steps", lambda part: part.check("a check", True, "7 steps"))
    monkeypatch.setattr(script.signal, "signal", lambda *_: None)
    site, out = tmp_path / "site", tmp_path / "out.json"
    (site / "sglang-0.5.17.dist-info").mkdir(parents=True)
    flags = ["steps", "--site", str(site), "--pair", str(tmp_path), "--patched", "--cpu", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["scripts/gpu_prove", *flags])

    with pytest.raises(SystemExit) as ended:
        script.main()

    assert ended.value.code == 0
    page = (tmp_path / "out.md").read_text().splitlines()
    assert page[0] == "# gpu_prove steps, SGLang 0.5.17"
    assert "- command: scripts/gpu_prove steps --site SITE --pair PAIR --patched --cpu --out OUT" in page
    assert "| steps | ok | a check: 7 steps |" in page


@pytest.mark.parametrize("page", sorted((PROJECT / "benchmarks/results").glob("*.md")), ids=lambda page: page.name)
def test_a_committed_page_names_no_folder_of_a_machine(page: Path) -> None:
    assert not re.search(r"/(tmp|home|root|work|opt)/", page.read_text("utf-8"))
