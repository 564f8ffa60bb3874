# SPDX-License-Identifier: Apache-2.0
"""What operators see of the exponents: `/server_info`, a log line when they have moved, a Prometheus gauge a depth."""

from __future__ import annotations

import logging
import time
from typing import Any

from sglang.srt.speculative.ddtree.calibration import Calibration
from sglang.srt.speculative.ddtree.host_copies import HostCopy
from sglang.srt.speculative.ddtree.report import labels_of, publish


logger = logging.getLogger(__name__)

#: Steps from one look at the exponents to the next, and from asking for a copy to reading it: it has long arrived.
_EVERY, _LATER = 512, 64
#: Seconds between two log lines at least, and how far an exponent has to move for one.
_LOG_EVERY, _MOVED = 60.0, 0.1


def tell_of(calibration: Calibration, rank: int) -> None:
    """Let operators see a calibration.

    Args:
        rank: In the tensor-parallel group; the first one logs and counts for all.
    """
    publish("ddtree_calibration", calibration.report)
    if rank == 0 and calibration.is_fitted:
        calibration.told = CalibrationReport(calibration, labels_of(rank)).step


class CalibrationReport:
    """Looks at the exponents now and then, without waiting for the device.

    Args:
        labels: Of the Prometheus gauge; None without `--enable-metrics`.
    """

    def __init__(self, calibration: Calibration, labels: dict[str, Any] | None) -> None:
        self._calibration, self._labels = calibration, labels
        self._steps = 0
        self._copy: HostCopy | None = None
        self._logged = [1.0] * calibration.state.shape[1]
        self._next_log = 0.0
        self._gauge: Any = None
        if labels is not None:
            # In a worker the variable is set that `prometheus_client` looks for when it is imported.
            from prometheus_client import Gauge

            self._gauge = Gauge(
                "sglang:ddtree_exponent",
                "Exponent on the drafter's probabilities, by depth.",
                [*labels, "depth"],
                multiprocess_mode="mostrecent",
            )

    def step(self) -> None:
        """A step was observed."""
        self._steps += 1
        if self._steps % _EVERY == 1:
            self._copy = HostCopy(self._calibration.state)
        elif self._copy is not None and self._steps % _EVERY == 1 + _LATER:
            self._tell(self._calibration.describe(self._copy.wait()))
            self._copy = None

    def _tell(self, found: dict[str, Any]) -> None:
        exponents = found["exponents"]
        if self._gauge is not None:
            for depth, exponent in enumerate(exponents, 1):
                self._gauge.labels(**self._labels, depth=str(depth)).set(exponent)
        now = time.monotonic()
        moved = max(abs(new - old) for new, old in zip(exponents, self._logged, strict=True))
        if moved >= _MOVED and now >= self._next_log:
            self._next_log, self._logged = now + _LOG_EVERY, exponents
            logger.info(
                "DDTREE calibration: exponents %s after %d labels of the first depth, which speak for them by %.3f "
                "nats each",
                " ".join(f"{exponent:.2f}" for exponent in exponents),
                int(found["labels"][0]),
                found["gain"][0],
            )
