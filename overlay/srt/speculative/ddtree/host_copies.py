# SPDX-License-Identifier: Apache-2.0
"""Copies between device and host that a step can do without waiting, or waits for as late as it can."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class HostCopy:
    """A copy of a tensor on its way to the host.

    Args:
        tensor: Not written to again before the copy is done, but by what is launched on the same stream.
        before: A copy that has been waited for and whose tensor nobody reads any more: its memory is used again.
    """

    def __init__(self, tensor: torch.Tensor, before: HostCopy | None = None) -> None:
        self._pinned: torch.Tensor | None = None
        self._done: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.is_cuda:
            if before is not None and before._fits(tensor):
                self._pinned, self._done = before._pinned, before._done
            else:
                self._pinned = torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=True)
                self._done = torch.cuda.Event()
            assert self._pinned is not None
            assert self._done is not None
            self._host = self._pinned[: tensor.numel()].view(tensor.shape)
            self._host.copy_(tensor, non_blocking=True)
            self._done.record()

    def _fits(self, tensor: torch.Tensor) -> bool:
        pinned = self._pinned
        return pinned is not None and pinned.dtype == tensor.dtype and pinned.numel() >= tensor.numel()

    def wait(self) -> torch.Tensor:
        """The tensor on the host; waits for what was launched before the copy, and for nothing that came after."""
        if self._done is not None:
            self._done.synchronize()
        return self._host


class StepCopies:
    """A copy a step, waited for before the next one is asked for: pinned memory and event are taken once."""

    def __init__(self) -> None:
        self._last: HostCopy | None = None

    def of(self, tensor: torch.Tensor) -> HostCopy:
        """The step's copy, on its way; the one before is not to be read any more."""
        self._last = HostCopy(tensor, self._last)
        return self._last


def indices_on(
    device: torch.device | str, lists: Sequence[Sequence[int]], last: torch.Tensor | None = None
) -> torch.Tensor:
    """Integers of the host one behind the other on the device, int64, in one copy that nobody waits for.

    Args:
        device: Where to.
        lists: Of any length.
        last: More of them, int64 [n] on the host.
    """
    given = torch.tensor([number for numbers in lists for number in numbers], dtype=torch.int64)
    if last is not None:
        given = torch.cat([given, last])
    if torch.device(device).type != "cuda":
        return given.to(device)
    return given.pin_memory().to(device, non_blocking=True)
