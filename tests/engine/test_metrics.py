# SPDX-License-Identifier: Apache-2.0
"""What a server with `auto` says of it: Prometheus metrics, `/server_info`, and its log."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tests.engine import harness
from tests.engine.serving import Serving, text_arguments


BUDGETS = (2, 7, 24)
#: Both generations, and one whose arguments stay as they were written (0.5.19 and later).
RELEASES = (harness.RELEASE, harness.SECOND_RELEASE, harness.SECOND_WORKER[-1])


@pytest.fixture(scope="module", params=RELEASES)
def serving(
    request: pytest.FixtureRequest, sites: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Serving, Path]]:
    """A server of each of these releases, after enough steps for several plans."""
    folder = tmp_path_factory.mktemp("metrics")
    arguments = text_arguments(
        "DDTREE",
        folder,
        speculative_ddtree_budget="auto",
        speculative_ddtree_budgets=",".join(map(str, BUDGETS)),
        disable_overlap_schedule=request.param == harness.RELEASE,
        enable_metrics=True,
    )
    with Serving.start(sites[request.param], arguments, folder / "server") as server:
        server.wait()
        end = time.monotonic() + 600
        while sum(rounds(server.get("/metrics").splitlines()).values()) <= 20:  # brought up to date once a second
            assert time.monotonic() < end
            ask(server)
        yield server, folder / "server/log.txt"


def rounds(lines: list[str]) -> dict[str, float]:
    """Rounds by budget, as the metrics tell."""
    found = [line for line in lines if line.startswith("sglang:ddtree_rounds_total{")]
    return {re.findall(r'budget="(\w+)"', line)[0]: float(line.split()[-1]) for line in found}


def ask(server: Serving) -> None:
    body = {"text": "one two three", "sampling_params": {"temperature": 0, "max_new_tokens": 90, "ignore_eos": True}}
    server.post("/generate", body)


def test_the_choice_is_exported_beside_sglangs_own_metrics(serving: tuple[Serving, Path]):
    """Rounds by budget, the budget of each batch size, tokens and milliseconds, with the labels of the scheduler."""
    lines = serving[0].get("/metrics").splitlines()
    found = [line for line in lines if line.startswith("sglang:ddtree_")]
    own = next(line for line in lines if line.startswith("sglang:num_running_reqs{"))

    for label in re.findall(r'(?:model_name|engine_type|tp_rank|pp_rank)="[^"]*"', own):
        assert all(label in line for line in found)
    assert set(rounds(lines)) <= {"2", "7", "24", "chain"}
    assert sum(rounds(lines).values()) > 20
    chosen = [float(line.split()[-1]) for line in found if line.startswith("sglang:ddtree_budget{")]
    assert chosen
    assert set(chosen) <= set(BUDGETS)
    sizes = [re.findall(r'batch_size="(\d+)"', line)[0] for line in found if line.startswith("sglang:ddtree_budget{")]
    assert len(sizes) == len(set(sizes)), "one answer for each batch size, whatever was chosen before"
    tokens = {kind: line for line in found for kind in ("expected", "measured") if f'kind="{kind}"' in line}
    assert all(1.0 <= float(line.split()[-1]) <= 8.0 for line in tokens.values())
    assert set(tokens) == {"expected", "measured"}
    assert any(line.startswith("sglang:ddtree_round_milliseconds{") for line in found)


def test_server_info_counts_the_steps_of_every_budget(serving: tuple[Serving, Path]):
    """And says what is planned for which batch size."""
    server, _ = serving
    (state,) = json.loads(server.get("/server_info"))["internal_states"]
    before = sum(state["ddtree_steps"].values())
    ask(server)
    (after,) = json.loads(server.get("/server_info"))["internal_states"]

    assert before > 20
    assert before < sum(after["ddtree_steps"].values()) <= before + 90
    assert set(after["ddtree_steps"]) <= {"2", "7", "24", "chain"}
    assert set(after["ddtree_plan"].values()) <= {"2", "7", "24", "chain"}
    assert "1" in after["ddtree_plan"]


def test_the_log_says_what_is_chosen_and_why(serving: tuple[Serving, Path]):
    """Budget, tokens and milliseconds of every choice; not at every plan, but ten seconds apart at least."""
    lines = [line for line in serving[1].read_text().splitlines() if "DDTREE auto: batches of up to 1 " in line]

    assert lines
    times = [datetime.fromisoformat(re.findall(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", line)[0]) for line in lines]
    assert all((after - one).seconds >= 9 for one, after in itertools.pairwise(times))
    assert re.search(r"budget \w+ \(tokens a request and round: 2 \d\.\d\d in \d+\.\d\d ms; 7 ", lines[0])
