# SPDX-License-Identifier: Apache-2.0
"""A tree as SGLang's recurrent (GDN, Mamba) verify kernels read it: first child and next sibling of every node.

With these the kernels keep one state a node, each from its parent's. They derive the parents themselves, in one pass
over the nodes: a parent has to come before its children and siblings in rising order, which is how a `Tree` numbers
them. Padding is linked from nowhere; the kernels then take the root for its parent, and nobody reads what comes out.

A verify input also says how many rows of a replayed CUDA graph are requests: see `padding_rows`.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.speculative.dflash_info import DFlashVerifyInput


def tree_links(parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """First child and next sibling of each node, -1 where there is none.

    Args:
        parents: Index of the parent node, below the node's own; -1 for the root and for padding; int64 [bs, W].

    Returns:
        Two int32 [bs, W], the type of the buffers that CUDA graphs replay from.
    """
    width = parents.shape[1]
    nodes = torch.arange(width, device=parents.device)
    # The nearest later node for which a condition holds, or W.
    child_of = parents.unsqueeze(1) == nodes.unsqueeze(1)  # [b, i, j] = j is a child of i
    sibling_of = (parents.unsqueeze(1) == parents.unsqueeze(2)) & (parents >= 0).unsqueeze(1) & (nodes > nodes[:, None])
    first_child, next_sibling = (
        torch.where(condition, nodes, width).amin(dim=2) for condition in (child_of, sibling_of)
    )
    return tuple(torch.where(link < width, link, -1).to(torch.int32) for link in (first_child, next_sibling))


def padding_rows(counted: Any, rows: int, spec_info: Any) -> Any:
    """How many rows of a replayed CUDA graph are padding, behind the batch's requests.

    SGLang counts rows as long as the filling, 1. The prefix of a verify step may be one token too: then the last
    request of the batch, whichever it is, was run without its recurrent state in that step. DFLASH has the same fault,
    so that every DFLASH verify input is counted here.

    Args:
        counted: SGLang's own count.
        rows: Rows of the graph.
        spec_info: What the forward verifies, or None.

    Returns:
        The count, int; `counted` as it is for what is no DFLASH or DDTREE verify input, and for one without tokens
        (a graph's capture, the drafter's block).
    """
    tokens = spec_info.draft_token if isinstance(spec_info, DFlashVerifyInput) else None
    if tokens is None or not tokens.numel():
        return counted
    return rows - tokens.numel() // spec_info.draft_token_num
