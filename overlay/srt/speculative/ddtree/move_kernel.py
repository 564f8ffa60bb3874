# SPDX-License-Identifier: Apache-2.0
"""Accepted nodes' KV to the front of their request's verify slots: every layer and request in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from sglang.srt.speculative.ddtree.launching import launch


#: What a thread copies at once; a row has to be a multiple of it.
WORD_BYTES = 8


@triton.jit(do_not_specialize=("width", "steps"), do_not_specialize_on_alignment=("slots", "path", "counts"))
def _move_kernel(
    buffers,  # uint64 [buffers]: addresses
    strides,  # int64 [buffers]: bytes of a row
    slots,  # int64 [bs, width]
    path,  # int64 [bs, steps]
    counts,  # integers [bs]
    width,
    steps,
    WORD_BYTES: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program moves one request's rows of one buffer in path order, a column of words a thread.

    Nodes rise along a path and no node is below its place in it, so a row is read before a later step overwrites it;
    and each word is read and written by the same thread, in the order of the program.
    """
    words = tl.load(strides + tl.program_id(0)) // WORD_BYTES
    base = tl.cast(tl.load(buffers + tl.program_id(0)), tl.pointer_type(tl.int64))
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    request = tl.program_id(2)
    for step in range(tl.load(counts + request)):
        node = tl.load(path + request * steps + step)
        if node != step:
            source = tl.load(slots + request * width + node)
            target = tl.load(slots + request * width + step)
            row = tl.load(base + source * words + columns, mask=columns < words)
            tl.store(base + target * words + columns, row, mask=columns < words)


def move_rows(
    buffers: torch.Tensor,
    strides: torch.Tensor,
    slots: torch.Tensor,
    path: torch.Tensor,
    counts: torch.Tensor,
    row_bytes: int,
) -> None:
    """Move rows of every buffer; `slots`, `path` and `counts` as in `kv_move.move_to_front`.

    Args:
        buffers: Addresses of the K and V buffers of all layers, uint64 [buffers].
        strides: Bytes of a row of each, int64 [buffers], multiples of 8.
        row_bytes: The largest of them.
    """
    words = row_bytes // WORD_BYTES
    tile = min(512, triton.next_power_of_2(words))
    grid = (buffers.numel(), triton.cdiv(words, tile), slots.shape[0])
    launch(
        _move_kernel,
        grid,
        (buffers, strides, slots.contiguous(), path.contiguous(), counts, slots.shape[1], path.shape[1]),
        {"WORD_BYTES": WORD_BYTES, "TILE": tile},
        num_warps=max(1, min(4, tile // 32)),
        num_stages=1,  # no load may be hoisted above the store of the row before
        key=counts.dtype,
    )
