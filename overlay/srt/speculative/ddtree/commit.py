# SPDX-License-Identifier: Apache-2.0
"""What comes out of one tree verify step, in the shapes of a DFLASH step: a block of S rows a request."""

from __future__ import annotations

import torch
from sglang.srt.speculative.ddtree.accept import Acceptance


def rows_of_batch(path: torch.Tensor, width: int) -> torch.Tensor:
    """Row of each path node among all nodes of the batch, -1 behind the end, int64 [bs, P].

    Args:
        path: Nodes from the root down, -1 behind the end, int64 [bs, P].
        width: Nodes per request.
    """
    first = torch.arange(path.shape[0], device=path.device).unsqueeze(1) * width
    return torch.where(path >= 0, path + first, -1)


def committed_rows(values: torch.Tensor, acceptance: Acceptance) -> torch.Tensor:
    """The values of the committed nodes in front of each block, [bs * S, ...]; what is behind them is not to be read.

    Args:
        values: One row a node, [bs * W, ...].
    """
    return values.index_select(0, acceptance.rows.view(-1))
