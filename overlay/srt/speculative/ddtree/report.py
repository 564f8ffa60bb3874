# SPDX-License-Identifier: Apache-2.0
"""What operators see of the lanes: log lines, Prometheus metrics, and a part of `/server_info`."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sglang.srt.speculative.ddtree.choice import Chooser, Step
from sglang.srt.speculative.ddtree.published import observability, serving
from sglang.srt.speculative.ddtree.replica import replica_of
from sglang.srt.speculative.ddtree.round_times import Choice


logger = logging.getLogger(__name__)

#: Seconds between two updates of the metrics, and between two log lines.
_METRICS_EVERY, _LOG_EVERY = 1.0, 10.0

#: What `/server_info` says, filled in by the worker of this process.
_STATE: dict[str, Any] = {}
#: Labels of the data-parallel replica that this process serves.
_REPLICA: dict[str, Any] = {}


def server_state() -> dict[str, Any]:
    """The worker's part of the scheduler's internal state; empty without DDTREE."""
    return {key: value() if callable(value) else value for key, value in _STATE.items()}


def publish(name: str, value: Any) -> None:
    """Let `/server_info` say something under a name: a value, or a call that gives it."""
    _STATE[name] = value


class Metrics:
    """Gauges and counters beside SGLang's own, with its labels.

    SGLang runs Prometheus with a process for each rank, so `prometheus_client` may be imported only once the variable
    that names its folder is set: in a worker it is. A series cannot be taken back there, so that no label may say what
    changes: a choice that is no more would be shown for ever.

    Args:
        labels: SGLang's labels of this process.
    """

    def __init__(self, labels: Mapping[str, Any]) -> None:
        from prometheus_client import Counter as Total
        from prometheus_client import Gauge

        self._labels = dict(labels)
        names = list(self._labels)
        self._rounds = Total(
            "sglang:ddtree_rounds",
            "Decode rounds verified with a budget, with the chain, or without a draft.",
            [*names, "budget"],
        )
        self._budget = Gauge(
            "sglang:ddtree_budget",
            "Draft nodes that batches of up to so many requests are verified with; 0 where nothing is drafted.",
            [*names, "batch_size"],
            multiprocess_mode="mostrecent",
        )
        self._chain = Gauge(
            "sglang:ddtree_chain",
            "1 where those nodes are DFLASH's chain, 0 where they are a tree.",
            [*names, "batch_size"],
            multiprocess_mode="mostrecent",
        )
        self._tokens = Gauge(
            "sglang:ddtree_tokens_per_round",
            "Tokens that a request gets of a round: expected of the plan, and measured.",
            [*names, "kind"],
            multiprocess_mode="mostrecent",
        )
        self._milliseconds = Gauge(
            "sglang:ddtree_round_milliseconds",
            "What a round of batches of up to so many requests is expected to take.",
            [*names, "batch_size", "budget"],
            multiprocess_mode="mostrecent",
        )
        self._counted: Counter[Choice] = Counter()

    def set_rounds(self, ran: Mapping[Choice, int]) -> None:
        """Bring the counters of rounds up to date."""
        for choice, count in ran.items():
            self._rounds.labels(**self._labels, budget=str(choice)).inc(count - self._counted[choice])
            self._counted[choice] = count

    def set_plan(self, plan: Mapping[int, Choice]) -> None:
        """What each bucket is verified with."""
        for bucket, choice in plan.items():
            self._budget.labels(**self._labels, batch_size=str(bucket)).set(choice.width - 1)
            self._chain.labels(**self._labels, batch_size=str(bucket)).set(choice.shape == "chain")

    def set_tokens(self, *, expected: float, measured: float | None) -> None:
        """Tokens a request and round."""
        self._tokens.labels(**self._labels, kind="expected").set(expected)
        if measured is not None:
            self._tokens.labels(**self._labels, kind="measured").set(measured)

    def set_times(self, bucket: int, table: Sequence[tuple[Choice, float, float]]) -> None:
        """Milliseconds a round in a bucket, from `Chooser.table`."""
        for choice, _, milliseconds in table:
            labels = {**self._labels, "batch_size": str(bucket), "budget": str(choice)}
            self._milliseconds.labels(**labels).set(milliseconds)


def name_replica(worker: Any) -> None:
    """Find out which data-parallel replica this process serves, before anything asks for labels.

    All replicas report to one place, where one's numbers would else be taken for another's.
    """
    rank = replica_of(worker)
    if rank is not None:
        _REPLICA["dp_rank"] = rank


def labels_of(tp_rank: int) -> dict[str, str] | None:
    """The labels that SGLang's scheduler puts on its own metrics; None without `--enable-metrics`."""
    if not observability().enable_metrics:
        return None
    labels = {
        "model_name": serving().served_model_name,
        "engine_type": "unified",
        "tp_rank": tp_rank,
        "pp_rank": 0,
        **_REPLICA,
        **(observability().extra_metric_labels or {}),
    }
    return {name: str(value) for name, value in labels.items()}


class Report:
    """Tells about the steps and plans of `auto`: called at every new plan, does something every second.

    Args:
        chooser: Whose plans they are.
        metrics: None without `--enable-metrics`.
        ran: Steps of each choice so far, those too that nothing was learned from.
    """

    def __init__(self, chooser: Chooser, metrics: Metrics | None, ran: Mapping[Choice, int]) -> None:
        self._chooser, self._metrics, self._ran = chooser, metrics, ran
        self._logged: dict[int, Choice] = {}
        self._next_log = self._next_metrics = 0.0
        self._tokens, self._requests = 0.0, 0
        self._bucket: int | None = None

    def tell(self, steps: Sequence[Step]) -> None:
        """A plan was made.

        Args:
            steps: What it learned from.
        """
        for step in steps:
            self._bucket = self._chooser.times.bucket(step.batch_size)
            if step.accepted or step.choice.shape == "none":
                self._tokens += sum(step.accepted[-1:]) + step.requests
                self._requests += step.requests
        now = time.monotonic()
        if self._bucket is None:
            return
        if now >= self._next_log and self._chooser.best(self._bucket) != self._logged.get(self._bucket):
            self._next_log = now + _LOG_EVERY
            self._logged[self._bucket] = self._chooser.best(self._bucket)
            logger.info("DDTREE auto: %s", self.line(self._bucket))
        if self._metrics is not None and now >= self._next_metrics:
            self._next_metrics = now + _METRICS_EVERY
            self._update(self._metrics, self._bucket)

    def line(self, bucket: int) -> str:
        """A bucket's choice, and what the choices promise there."""
        table = "; ".join(
            f"{choice} {tokens:.2f} in {milliseconds:.2f} ms"
            for choice, tokens, milliseconds in self._chooser.table(bucket)
        )
        return (
            f"batches of up to {bucket} are verified with budget {self._chooser.best(bucket)} "
            f"(tokens a request and round: {table})"
        )

    def _update(self, metrics: Metrics, bucket: int) -> None:
        metrics.set_rounds(self._ran)
        metrics.set_plan({known: self._chooser.best(known) for known in self._chooser.times.buckets})
        best = self._chooser.best(bucket)
        table = self._chooser.table(bucket)
        expected = next(tokens for choice, tokens, _ in table if choice == best)
        metrics.set_tokens(expected=expected, measured=self._tokens / self._requests if self._requests else None)
        metrics.set_times(bucket, table)
        self._tokens, self._requests = 0.0, 0
