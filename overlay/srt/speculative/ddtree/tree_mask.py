# SPDX-License-Identifier: Apache-2.0
"""The ancestor mask of a batch, written where an attention backend reads it, without asking the device for a length.

With overlap scheduling the host does not know how long a request is when its step is launched, only how long it can be
at most. The places of a mask's bits follow from the lengths on the device; the host only sees to it that there is room.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.speculative.ddtree.args import draft_width


def mask_columns(backend: Any) -> int:
    """Longest row of a mask: the context, the tree, and a block, since a step may be launched before one is counted.

    Args:
        backend: SGLang's Triton attention backend of the target.
    """
    return int(backend.max_context_len) + draft_width() + int(backend.num_draft_tokens)


def write_tree_mask(out: torch.Tensor, ancestors: torch.Tensor, prefix_lens: torch.Tensor) -> None:
    """Write the flat allow-mask: every request's W rows of prefix + W columns, one request behind the other.

    Row i of a request is node i; it sees the whole prefix, its ancestors and itself. What lies behind the rows of the
    last request is set to 1.

    Args:
        out: bool or uint8 [n], n at least the sum over requests of W * (prefix + W).
        ancestors: [b, i, j] = node j is node i or an ancestor of it, bool [bs, W, W].
        prefix_lens: Committed tokens of each request, int64 [bs].
    """
    width = ancestors.shape[1]
    columns = (prefix_lens + width).view(-1, 1, 1)
    ends = (columns * width).cumsum(dim=0)
    nodes = torch.arange(width, device=out.device)
    starts = ends - columns * width + prefix_lens.view(-1, 1, 1)
    places = starts + nodes.view(1, -1, 1) * columns + nodes
    out.fill_(1)
    out.scatter_(0, places.flatten(), ancestors.flatten().to(out.dtype))
