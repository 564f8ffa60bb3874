# SPDX-License-Identifier: Apache-2.0
"""What a graph of the draft KV reads, put where it reads it: hidden states of committed nodes, and their number."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from sglang.srt.speculative.ddtree.launching import LEAST_REQUESTS, launch


@triton.jit(
    do_not_specialize=("batch", "padded"), do_not_specialize_on_alignment=("rows", "commit_lens", "staged_lens")
)
def _stage_kernel(
    hidden,  # [nodes, features]
    rows,  # int64 [bs * block]
    commit_lens,  # int32 [bs]
    staged_hidden,  # [padded * block, features]
    staged_lens,  # int32 [padded]
    features,
    batch,
    padded,
    PADDED: tl.constexpr,  # a power of two, at least the padded batch
    TILE: tl.constexpr,
):
    """One program copies a tile of one row; the first of all writes the lengths, 0 for requests that are padding."""
    place = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    row = tl.load(rows + place)
    values = tl.load(hidden + row * features + columns, mask=columns < features)
    tl.store(staged_hidden + place * features + columns, values, mask=columns < features)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        requests = tl.arange(0, PADDED)
        lens = tl.load(commit_lens + requests, mask=requests < batch, other=0)
        tl.store(staged_lens + requests, lens, mask=requests < padded)


def stage(
    hidden: torch.Tensor,
    rows: torch.Tensor,
    commit_lens: torch.Tensor,
    staged_hidden: torch.Tensor,
    staged_lens: torch.Tensor,
) -> None:
    """Copy the committed nodes' hidden states to the front of `staged_hidden`, and the lengths, 0 behind them.

    Args:
        hidden: Of all nodes, [bs * W, features], contiguous.
        rows: Row of each committed node, int64 [bs, S].
        commit_lens: int32 [bs].
        staged_hidden: [padded * S, features], contiguous; rows of padding are left as they are.
        staged_lens: int32 [padded].
    """
    features, padded = hidden.shape[1], staged_lens.shape[0]
    tile = min(2048, triton.next_power_of_2(features))
    args = (hidden, rows, commit_lens, staged_hidden, staged_lens, features, commit_lens.shape[0], padded)
    constants = {"PADDED": max(LEAST_REQUESTS, triton.next_power_of_2(padded)), "TILE": tile}
    grid = (rows.numel(), triton.cdiv(features, tile), 1)
    launch(_stage_kernel, grid, args, constants, num_warps=4, key=(hidden.dtype, hidden.data_ptr() % 16, features))
