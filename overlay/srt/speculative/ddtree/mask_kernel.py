# SPDX-License-Identifier: Apache-2.0
"""The ancestor mask in one kernel launch: each row walks up its node's parents.

Where a request's cells begin follows from the lengths of the requests before it, which every program adds up itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from sglang.srt.speculative.ddtree.launching import LEAST_REQUESTS, launch
from sglang.srt.speculative.ddtree.tree import Tree


#: One compiled kernel serves many batches and widths: a step must not wait for a compiler.
_SIZES = ("room", "batch", "tree_stride", "width", "depth")
_TENSORS = ("out", "parents", "prefix_lens")

#: Cells of a prefix, or behind the last request, that a program fills at once.
_FILL = 4096


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_TENSORS)
def _mask_kernel(
    out,  # uint8, flat
    parents,  # int64 [bs, W], stride `tree_stride`
    prefix_lens,  # integers [bs]
    room,  # cells of `out`
    batch,
    tree_stride,
    width,
    depth,  # most ancestors of a node
    ROWS: tl.constexpr,  # rows of a program
    COLUMNS: tl.constexpr,  # a power of two, at least W
    BATCH: tl.constexpr,  # a power of two, at least the batch
    WHOLE: tl.constexpr,
    FILL: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    others = tl.arange(0, BATCH)
    before = tl.load(prefix_lens + others, mask=(others < batch) & (others < request), other=0).to(tl.int64)
    start = width * (tl.sum(before, axis=0) + tl.minimum(request, batch) * width)
    if request >= batch:
        for tile in range(start + tl.program_id(1) * FILL, room, tl.num_programs(1) * FILL):
            place = tile + tl.arange(0, FILL)
            tl.store(out + place, tl.full([FILL], 1, tl.uint8), mask=place < room)
    else:
        prefix = tl.load(prefix_lens + request).to(tl.int64)
        rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        columns = tl.arange(0, COLUMNS)
        inside = rows < width
        node = rows.to(tl.int64)
        seen = columns[None, :] == node[:, None]
        for _ in range(depth):
            node = tl.load(parents + request * tree_stride + node, mask=inside & (node >= 0), other=-1)
            seen = seen | (columns[None, :] == node[:, None])
        row_starts = start + rows * (prefix + width)
        cells = out + row_starts[:, None] + prefix + columns[None, :]
        tl.store(cells, seen.to(tl.uint8), mask=inside[:, None] & (columns[None, :] < width))
        if WHOLE:
            for row in range(tl.program_id(1) * ROWS, tl.minimum(tl.program_id(1) * ROWS + ROWS, width)):
                for tile in range(0, prefix, FILL):
                    place = tile + tl.arange(0, FILL)
                    cell = out + start + row * (prefix + width) + place
                    tl.store(cell, tl.full([FILL], 1, tl.uint8), mask=place < prefix)


def write_masks(out: torch.Tensor, tree: Tree, prefix_lens: torch.Tensor, *, whole: bool) -> None:
    """Write the mask of a batch; arguments as in `tree_mask.write_tree_mask`."""
    batch, width = tree.parents.shape
    rows = 1 if whole else 8
    cells = out if out.dtype == torch.uint8 else out.view(torch.uint8)
    args = (cells, tree.parents, prefix_lens, out.numel())
    args += (batch, tree.parents.stride(0), width, tree.max_depth)
    constants = {
        "ROWS": rows,
        "COLUMNS": max(32, triton.next_power_of_2(width)),
        "BATCH": max(LEAST_REQUESTS, triton.next_power_of_2(batch)),
        "WHOLE": whole,
        "FILL": _FILL,
    }
    grid = (batch + int(whole), triton.cdiv(width, rows), 1)  # a program more for what lies behind
    launch(
        _mask_kernel, grid, args, constants, num_warps=4 if whole else 1, key=(prefix_lens.dtype, out.numel() >> 31 > 0)
    )
