# SPDX-License-Identifier: Apache-2.0
"""The accept walk in one kernel launch: a node is accepted if its token is the one that the target chose at its parent.

One program walks one request, level by level: of the nodes one level deeper whose parent is the last accepted node, the
one with the parent's target token. Siblings hold distinct tokens, so there is one at most.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from sglang.srt.speculative.ddtree.accept import Acceptance
from sglang.srt.speculative.ddtree.launching import launch
from sglang.srt.speculative.ddtree.tree import Tree


#: One compiled kernel serves every batch and width: a step must not wait for a compiler.
_SIZES = ("tree_stride", "target_stride", "width", "steps", "block_size")
_TENSORS = ("tokens", "parents", "target_tokens", "root_only", "prefix_lens", "report", "others", "commit_lens")


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_TENSORS)
def _accept_kernel(
    tokens,  # int64 [bs, W], stride `tree_stride`
    parents,  # int64 [bs, W], stride `tree_stride`
    target_tokens,  # int64 [bs, W], stride `target_stride`
    root_only,  # bool [bs], or None
    prefix_lens,  # integers [bs]
    report,  # int64 out: tokens [bs, S], path [bs, P], accept lengths [bs]
    others,  # int64 out: rows [bs, S], bonus [bs], new lengths [bs], last nodes [bs]
    commit_lens,  # int32 [bs] out
    tree_stride,
    target_stride,
    width,
    steps,  # P
    block_size,  # S
    NODES: tl.constexpr,  # a power of two, at least W
    BLOCK: tl.constexpr,  # a power of two, at least S
):
    request = tl.program_id(0).to(tl.int64)
    batch = tl.num_programs(0).to(tl.int64)
    nodes = tl.arange(0, NODES)
    inside = nodes < width
    at = request * tree_stride + nodes
    parent = tl.load(parents + at, mask=inside, other=-1).to(tl.int32)
    token = tl.load(tokens + at, mask=inside, other=0)
    targets = target_tokens + request * target_stride
    wanted = tl.load(targets + tl.maximum(parent, 0), mask=inside & (parent >= 0), other=0)
    # Of an accepted node that is a parent, the accepted child; -1 for nodes that do not match.
    matched = tl.where((parent >= 0) & (token == wanted), parent, -1)
    if root_only is not None:
        matched = tl.where(tl.load(root_only + request).to(tl.int32) != 0, -1, matched)

    places = tl.arange(0, BLOCK)
    path = tl.where(places == 0, 0, -1)
    last = tl.program_id(0) * 0
    count = last
    for step in range(1, steps):
        found = tl.max(tl.where(matched == last, nodes, -1), axis=0)
        going = (found >= 0) & (count == step - 1)
        path = tl.where((places == step) & going, found, path)
        last = tl.where(going, found, last)
        count += going.to(tl.int32)

    bonus = tl.load(targets + last)
    # Token i of a step is that of path node i + 1, which is what the target chose at path node i.
    emitted = tl.load(targets + tl.maximum(path, 0), mask=path >= 0, other=0)
    in_block = places < block_size
    tl.store(report + request * block_size + places, emitted, mask=in_block)
    paths = report + batch * block_size
    tl.store(paths + request * steps + places, path.to(tl.int64), mask=places < steps)
    tl.store(paths + batch * steps + request, count.to(tl.int64))
    row = request * width + tl.maximum(path, 0)
    tl.store(others + request * block_size + places, row, mask=in_block)
    tails = others + batch * block_size + request
    tl.store(tails, bonus)
    tl.store(tails + batch, tl.load(prefix_lens + request).to(tl.int64) + count + 1)
    tl.store(tails + 2 * batch, last.to(tl.int64))
    tl.store(commit_lens + request, count + 1)


def accept_by_walk(
    tree: Tree,
    target_tokens: torch.Tensor,
    *,
    prefix_lens: torch.Tensor,
    block_size: int,
    root_only: torch.Tensor | None = None,
) -> Acceptance:
    """Accept a path of every tree; arguments and result as in `accept.accept_by_closure`."""
    batch, width = target_tokens.shape
    steps, device = tree.max_depth + 1, target_tokens.device
    report = torch.empty(batch * (block_size + steps + 1), dtype=torch.int64, device=device)
    others = torch.empty(batch * (block_size + 3), dtype=torch.int64, device=device)
    commit_lens = torch.empty(batch, dtype=torch.int32, device=device)
    args = (tree.tokens, tree.parents, target_tokens, root_only, prefix_lens, report, others, commit_lens)
    sizes = (tree.tokens.stride(0), target_tokens.stride(0), width, steps, block_size)
    constants = {"NODES": max(32, triton.next_power_of_2(width)), "BLOCK": triton.next_power_of_2(block_size)}
    key = (root_only is None, prefix_lens.dtype)
    launch(_accept_kernel, (batch, 1, 1), args + sizes, constants, num_warps=1, key=key)
    tokens, path, accept_lens = report.split((batch * block_size, batch * steps, batch))
    rows, bonus, new_seq_lens, last_nodes = others.split((batch * block_size, batch, batch, batch))
    return Acceptance(
        report=report,
        path=path.view(batch, steps),
        accept_lens=accept_lens,
        bonus=bonus,
        commit_lens=commit_lens,
        new_seq_lens=new_seq_lens,
        tokens=tokens.view(batch, block_size),
        rows=rows.view(batch, block_size),
        last_nodes=last_nodes,
    )
