# SPDX-License-Identifier: Apache-2.0
"""The metrics as a scrape shows them: the real `prometheus_client`, with a file for each process as SGLang runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from sglang.srt.speculative.ddtree import report
from sglang.srt.speculative.ddtree.report import labels_of, name_replica
from tests.overlay.publishing import publish


#: A worker process: what it is told, one plan after the other.
WORKER = """
from sglang.srt.speculative.ddtree.report import Metrics
from sglang.srt.speculative.ddtree.round_times import Choice

metrics = Metrics({"model_name": "m", "tp_rank": "0"})
tree, chain, none = Choice(8), Choice(8, "chain"), Choice(1, "none")
for choice in (none, tree, chain):
    metrics.set_plan({1: choice, 4: tree})
metrics.set_times(1, [(tree, 2.0, 5.0), (none, 1.0, 3.0)])
metrics.set_times(4, [(chain, 2.0, 7.0)])
metrics.set_rounds({tree: 3})
metrics.set_rounds({tree: 5, chain: 1})
metrics.set_tokens(expected=2.5, measured=None)
"""

#: The HTTP server's process: what it answers to a scrape.
SCRAPE = """
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

registry = CollectorRegistry()
MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def arguments(**changed: object) -> SimpleNamespace:
    """Published arguments of a server with metrics."""
    base: dict[str, object] = {"served_model_name": "qwen", "enable_metrics": True, "extra_metric_labels": None}
    return SimpleNamespace(**(base | changed))


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Python code in a process of its own, beside the same SGLang."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PROMETHEUS_MULTIPROC_DIR": str(folder)}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)


def test_a_scrape_shows_what_is_chosen_now_and_nothing_of_before(tmp_path: Path):
    """Nothing is taken back in files of several processes: a label that changes leaves its last value for ever."""
    told = run(WORKER, tmp_path)
    lines = [line for line in run(SCRAPE, tmp_path).stdout.splitlines() if line.startswith("sglang:")]

    assert "Removal of labels" not in told.stderr
    assert sorted(lines) == [
        'sglang:ddtree_budget{batch_size="1",model_name="m",tp_rank="0"} 7.0',
        'sglang:ddtree_budget{batch_size="4",model_name="m",tp_rank="0"} 7.0',
        'sglang:ddtree_chain{batch_size="1",model_name="m",tp_rank="0"} 1.0',
        'sglang:ddtree_chain{batch_size="4",model_name="m",tp_rank="0"} 0.0',
        'sglang:ddtree_round_milliseconds{batch_size="1",budget="7",model_name="m",tp_rank="0"} 5.0',
        'sglang:ddtree_round_milliseconds{batch_size="1",budget="none",model_name="m",tp_rank="0"} 3.0',
        'sglang:ddtree_round_milliseconds{batch_size="4",budget="chain",model_name="m",tp_rank="0"} 7.0',
        'sglang:ddtree_rounds_total{budget="7",model_name="m",tp_rank="0"} 5.0',
        'sglang:ddtree_rounds_total{budget="chain",model_name="m",tp_rank="0"} 1.0',
        'sglang:ddtree_tokens_per_round{kind="expected",model_name="m",tp_rank="0"} 2.5',
    ]


def test_labels_are_those_of_the_arguments_that_are_published():
    """From 0.5.19 on the arguments stay as they were written: there the model's name is None unless it was given."""
    publish(arguments(extra_metric_labels={"site": "a"}))
    assert labels_of(0) == {
        "model_name": "qwen", "engine_type": "unified", "tp_rank": "0", "pp_rank": "0", "site": "a",
    }  # fmt: skip


@pytest.mark.parametrize("enabled", [True, False])
def test_without_metrics_there_are_no_labels(*, enabled: bool):
    """And `prometheus_client` is not imported."""
    publish(arguments(enable_metrics=enabled))
    assert (labels_of(0) is not None) == enabled


def test_replicas_label_what_they_report(monkeypatch: pytest.MonkeyPatch):
    """All replicas of `--dp-size` report to one place (vllm#24049)."""
    monkeypatch.setattr(report, "_REPLICA", {})
    monkeypatch.setattr(report, "replica_of", lambda worker: worker)
    publish(arguments())
    name_replica(None)
    alone = labels_of(0)
    name_replica(1)

    assert labels_of(0) == {**(alone or {}), "dp_rank": "1"}
    assert "dp_rank" not in (alone or {})
