# SPDX-License-Identifier: Apache-2.0
"""Moments between which time is measured: CUDA events on the current stream, or the host's clock in their shape."""

from __future__ import annotations

import time
from typing import Any

import torch


class HostMoment:
    """A moment of the host's clock, for engines without a device to time."""

    def record(self) -> None:
        """Set the moment."""
        self._at = time.perf_counter()

    def query(self) -> bool:
        """Whether it has passed."""
        return True

    def elapsed_time(self, end: HostMoment) -> float:
        """Milliseconds to another moment."""
        return 1000.0 * (end._at - self._at)


class Moments:
    """Moments that can be used again.

    Args:
        on_gpu: Whether the device is timed.
    """

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._spare: list[Any] = []

    def now(self) -> Any:
        """This moment, on the current stream: `query` it, and ask it for `elapsed_time`, never wait for it."""
        moment = self._spare.pop() if self._spare else self._new()
        moment.record()
        return moment

    def give_back(self, *moments: Any) -> None:
        """Nobody looks at them any more."""
        self._spare += moments

    def _new(self) -> Any:
        return torch.cuda.Event(enable_timing=True) if self._on_gpu else HostMoment()
