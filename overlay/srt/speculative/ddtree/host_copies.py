# SPDX-License-Identifier: Apache-2.0
"""Copies between device and host that a step can do without waiting, or waits for as late as it can."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class HostCopy:
    """A copy of a tensor on its way to the host.

    Args:
        tensor: Not written to again before the copy is done, but by what is launched on the same stream.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._done: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()
        else:
            self._host = tensor

    def wait(self) -> torch.Tensor:
        """The tensor on the host; waits for what was launched before the copy, and for nothing that came after."""
        if self._done is not None:
            self._done.synchronize()
        return self._host


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
