# SPDX-License-Identifier: Apache-2.0
"""A tree as SGLang's recurrent (GDN, Mamba) verify kernels read it: first child and next sibling of every node.

With these the kernels keep one state a node, each from its parent's. They derive the parents themselves, in one pass
over the nodes: a parent has to come before its children and siblings in rising order, which is how a `Tree` numbers
them. Padding is linked from nowhere; the kernels then take the root for its parent, and nobody reads what comes out.
"""

from __future__ import annotations

import torch


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
