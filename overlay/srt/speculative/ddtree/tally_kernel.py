# SPDX-License-Identifier: Apache-2.0
"""`tally` in one launch: a program a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from sglang.srt.speculative.ddtree.launching import launch


if TYPE_CHECKING:
    from sglang.srt.speculative.ddtree.accept import Acceptance
    from sglang.srt.speculative.ddtree.tree import Tree


#: One compiled kernel serves every batch, width and lane: a step must not wait for a compiler.
_SIZES = (
    "out_stride",
    "grown",
    "scores_stride",
    "width",
    "rank_stride",
    "parent_stride",
    "steps",
    "path_stride",
    "positions",
    "request_stride",
    "position_stride",
)
_TENSORS = (
    "out",
    "widths",
    "scores",
    "ranks",
    "parents",
    "path",
    "accept_lens",
    "last_nodes",
    "bonus",
    "log_probs",
    "token_ids",
)
#: Nodes and steps up to which that one serves.
_NODES, _STEPS = 256, 16


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_TENSORS)
def _count(
    out,
    widths,
    scores,
    ranks,
    parents,
    path,
    accept_lens,
    last_nodes,
    bonus,
    log_probs,
    token_ids,
    out_stride,
    grown,
    scores_stride,
    width,
    rank_stride,
    parent_stride,
    steps,
    path_stride,
    positions,
    request_stride,
    position_stride,
    WIDTHS: tl.constexpr,
    GROWN: tl.constexpr,
    NODES: tl.constexpr,
    STEPS: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    accepted = tl.load(accept_lens + request)
    last = tl.load(last_nodes + request)

    grown_nodes = tl.arange(0, GROWN)
    score = tl.load(scores + request * scores_stride + grown_nodes, mask=grown_nodes < grown, other=float("-inf"))
    probability = tl.exp(score)
    step = tl.arange(0, STEPS)
    node = tl.load(path + request * path_stride + step, mask=step < steps, other=-1)
    row = out + request * out_stride
    for ring in tl.static_range(WIDTHS):
        ring_width = tl.load(widths + ring)
        tl.store(row + ring, tl.sum(((node >= 1) & (node < ring_width)).to(tl.float32)))
        within = (grown_nodes >= 1) & (grown_nodes < ring_width)
        tl.store(row + WIDTHS + ring, tl.sum(tl.where(within, probability, 0.0)))

    rank = tl.load(ranks + request * rank_stride + node, mask=node >= 0, other=0)
    left = tl.min(tl.where((node >= 0) & (rank != 0), step, STEPS))
    seen = tl.minimum(left - 1, accepted)
    nodes = tl.arange(0, NODES)
    parent = tl.load(parents + request * parent_stride + nodes, mask=nodes < width, other=-2)
    own_rank = tl.load(ranks + request * rank_stride + nodes, mask=nodes < width, other=1)
    held = tl.max(((parent == last) & (own_rank == 0)).to(tl.int32))
    inside = accepted < positions
    first = request * request_stride
    wanted = tl.load(token_ids + first + accepted * position_stride, mask=inside, other=-1)
    cut = inside & (seen == accepted) & (held == 0) & (wanted == tl.load(bonus + request))
    position = tl.arange(0, POSITIONS)
    behind = (position > accepted) & (position < positions)
    level = tl.load(log_probs + first + position * position_stride, mask=behind, other=0.0)
    rest = tl.sum(tl.where(behind, tl.exp(tl.cumsum(level)), 0.0))
    tl.store(row + 2 * WIDTHS, seen.to(tl.float32) + tl.where(cut, 1.0 + rest, 0.0))


def tally_by_kernel(
    out: torch.Tensor,
    widths: torch.Tensor,
    tree: Tree,
    acceptance: Acceptance,
    choices: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """One launch; arguments as in `tally.tally_step`."""
    scores, path, (log_probs, token_ids) = tree.grown_scores, acceptance.path, choices
    grown, width, steps, positions = scores.shape[1], tree.ranks.shape[1], path.shape[1], log_probs.shape[1]
    if log_probs.stride() != token_ids.stride():
        raise RuntimeError(f"DDTREE: choices laid out as {log_probs.stride()} and {token_ids.stride()}, not alike")
    tensors = (
        out,
        widths,
        scores,
        tree.ranks,
        tree.parents,
        path,
        acceptance.accept_lens,
        acceptance.last_nodes,
        acceptance.bonus,
        log_probs,
        token_ids,
    )
    sizes = (
        out.stride(0),
        grown,
        scores.stride(0),
        width,
        tree.ranks.stride(0),
        tree.parents.stride(0),
        steps,
        path.stride(0),
        positions,
        log_probs.stride(0),
        log_probs.stride(1),
    )
    constants = {
        "WIDTHS": len(widths),
        "GROWN": max(_NODES, triton.next_power_of_2(grown)),
        "NODES": max(_NODES, triton.next_power_of_2(width)),
        "STEPS": max(_STEPS, triton.next_power_of_2(steps)),
        "POSITIONS": max(_STEPS, triton.next_power_of_2(positions)),
    }
    launch(_count, (min(len(out), len(scores)), 1, 1), tensors + sizes, constants, num_warps=1)
