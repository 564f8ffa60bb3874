# SPDX-License-Identifier: Apache-2.0
"""The host's clock, set by a test: what a step takes is what the test says, however busy the machine is."""

from __future__ import annotations

from sglang.srt.speculative.ddtree import moments


class HostClock:
    """In the place of `time` where moments are taken. Each look at it takes ten microseconds."""

    def __init__(self) -> None:
        self._now = 100.0

    def perf_counter(self) -> float:
        """The time, in seconds."""
        self._now += 1e-5
        return self._now

    def sleep(self, seconds: float) -> None:
        """Let so much time pass."""
        self._now += seconds


def install(clock: HostClock) -> None:
    """Take every moment by this clock, for as long as the process lives."""
    moments.time = clock
