# SPDX-License-Identifier: Apache-2.0
"""What comes out of one tree verify step, in the shapes of a DFLASH step: P steps of a path in blocks of B rows."""

from __future__ import annotations

import torch
from sglang.srt.speculative.ddtree.accept import Acceptance
from sglang.srt.speculative.ddtree.tree import Tree


def rows_of_batch(path: torch.Tensor, width: int) -> torch.Tensor:
    """Row of each path node among all nodes of the batch, -1 behind the end, int64 [bs, P].

    Args:
        path: Nodes from the root down, -1 behind the end, int64 [bs, P].
        width: Nodes per request.
    """
    first = torch.arange(path.shape[0], device=path.device).unsqueeze(1) * width
    return torch.where(path >= 0, path + first, -1)


def committed_rows(values: torch.Tensor, rows: torch.Tensor, block_size: int) -> torch.Tensor:
    """The values of the path's nodes in front of each block, [bs * B, ...]; what is behind them is not to be read.

    Args:
        values: One row a node, [bs * W, ...].
        rows: From `rows_of_batch`, int64 [bs, P], P at most B.
        block_size: B.
    """
    padded = torch.nn.functional.pad(rows.clamp(min=0), (0, block_size - rows.shape[1]))
    return values[padded.flatten()]


def emitted_tokens(tree: Tree, acceptance: Acceptance, block_size: int) -> torch.Tensor:
    """Accepted draft tokens and bonus of each request, 0 behind them, int64 [bs, B]."""
    tokens = tree.tokens.gather(1, acceptance.path.clamp(min=0)).masked_fill(acceptance.path < 0, 0)
    tokens = torch.nn.functional.pad(tokens[:, 1:], (0, block_size - tokens.shape[1] + 1))
    return tokens.scatter(1, acceptance.accept_lens.unsqueeze(1), acceptance.bonus.unsqueeze(1))
