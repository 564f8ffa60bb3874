# SPDX-License-Identifier: Apache-2.0
"""The ancestor mask of a batch, written where an attention backend reads it, without asking the device for a length.

With overlap scheduling the host does not know how long a request is when its step is launched, only how long it can be
at most. The places of a mask's cells follow from the lengths on the device; the host only sees to it that there is
room.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.speculative.ddtree.tree import Tree


def mask_columns(backend: Any) -> int:
    """Longest row of a mask: the context, the tree, and a block, since a step may be launched before one is counted.

    Args:
        backend: SGLang's Triton attention backend of the target.
    """
    from sglang.srt.speculative.ddtree.args import draft_width

    return int(backend.max_context_len) + draft_width() + int(backend.num_draft_tokens)


def write_tree_mask(out: torch.Tensor, tree: Tree, prefix_lens: torch.Tensor, *, whole: bool) -> None:
    """Write the flat allow-mask: every request's W rows of prefix + W columns, one request behind the other.

    Row i of a request is node i; it sees the whole prefix, its ancestors and itself. On a GPU this is one launch.

    Args:
        out: bool or uint8 [n], n at least the sum over requests of W * (prefix + W).
        tree: Its parents are read, whatever their row stride.
        prefix_lens: Committed tokens of each request, integers [bs].
        whole: Whether to write the cells of the prefix too, all 1, and those behind the last request: a CUDA graph
            captured for a larger batch reads them for its unused rows, and a row that sees nothing gives NaN. Only the
            W * W cells behind a prefix tell anything new, and a backend that does not look at a prefix's cells needs no
            more; all others are left as they are then.
    """
    if out.is_cuda:
        from sglang.srt.speculative.ddtree.mask_kernel import write_masks as write
    else:
        write = write_by_rows
    write(out, tree, prefix_lens, whole=whole)


def write_by_rows(out: torch.Tensor, tree: Tree, prefix_lens: torch.Tensor, *, whole: bool) -> None:
    """The mask request by request, the reference; arguments as in `write_tree_mask`."""
    width, start = tree.width, 0
    for prefix_len, ancestors in zip(prefix_lens.tolist(), tree.ancestors, strict=True):
        end = start + width * (prefix_len + width)
        rows = out[start:end].view(width, prefix_len + width)
        if whole:
            rows[:, :prefix_len] = 1
        rows[:, prefix_len:] = ancestors
        start = end
    if whole:
        out[start:] = 1


def verify_mask(tree: Tree, prefix_lens: list[int]) -> torch.Tensor:
    """The whole mask in a tensor of its own, bool; arguments as in `write_tree_mask`."""
    device = tree.parents.device
    cells = sum(tree.width * (prefix_len + tree.width) for prefix_len in prefix_lens)
    out = torch.empty(cells, dtype=torch.bool, device=device)
    write_tree_mask(out, tree, torch.tensor(prefix_lens, device=device), whole=True)
    return out
