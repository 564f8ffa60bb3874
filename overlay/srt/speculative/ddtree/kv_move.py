# SPDX-License-Identifier: Apache-2.0
"""Moving the KV of accepted nodes to the front of their request's verify slots, which paged pools need.

With page size 1 a request's row is pointed at the accepted slots where they lie. A page holds consecutive positions,
so with larger pages node `path[i]` has to lie in the slot of position prefix + i. SGLang's own `move_kv_cache` is not
used: its kernel loads and stores a block of rows with several warps and no barrier, and one row's target is another's
source as soon as two moved nodes follow each other; hybrid pools are built without it; the one of float4 pools leaves
the scales behind.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool
from sglang.srt.speculative.ddtree.move_kernel import WORD_BYTES, move_rows


def movable_pool(pool: Any, page_size: int | None = None) -> MHATokenToKVPool:
    """The pool that holds every byte of a token's KV in `k_buffer` and `v_buffer`, one row a slot.

    Args:
        pool: The target's KV pool.
        page_size: For the text of the refusal: the page size that makes KV move; None where it always moves.

    Raises:
        ValueError: The pool keeps KV elsewhere too, or in a layout that is not proven.
    """
    inner = pool.full_kv_pool if type(pool) is HybridLinearKVPool else pool
    layout, what = getattr(inner, "kv_cache_layout", "nhd"), type(inner).__name__
    # From SGLang 0.5.17 on a quantised pool is of the plain class, with scales in buffers of their own.
    has_scales = getattr(inner, "is_quantized_kv_cache", False)
    if type(inner) is MHATokenToKVPool and layout == "nhd" and not has_scales:
        return inner
    if layout != "nhd":
        what = f"the layout {layout} of {what}"
    elif has_scales:
        what = f"the scales of a quantised {what}"
    when, advice = "", "Use another --kv-cache-dtype if that chose the pool, or --speculative-algorithm DFLASH."
    if page_size is not None:
        when = f" when --page-size is above 1 (it is {page_size})"
        advice = "Use --page-size 1, or another --kv-cache-dtype if that chose the pool."
    raise ValueError(f"DDTREE moves accepted KV{when}, and that is not proven for {what}. {advice}")


def move_to_front(pool: MHATokenToKVPool, slots: torch.Tensor, path: torch.Tensor, counts: torch.Tensor) -> None:
    """Copy, in every layer, the KV of slot `path[b, i]` of request b to its slot i, for all i below `counts[b]`.

    Args:
        pool: From `movable_pool`.
        slots: Verify slots by node, int64 [bs, W]; no slot twice.
        path: Nodes from the root down, int64 [bs, P], rising up to the count.
        counts: Nodes to keep of each request, integers [bs], at most P.
    """
    row_bytes = [buffer.stride(0) * buffer.element_size() for buffer in (pool.k_buffer[0], pool.v_buffer[0])]
    if slots.is_cuda and all(count % WORD_BYTES == 0 for count in row_bytes):
        move_rows(pool.data_ptrs, pool.data_strides, slots, path, counts, max(row_bytes))
        return
    steps = torch.arange(path.shape[1], device=path.device)
    moved = (steps < counts.unsqueeze(1)) & (path != steps)
    sources = slots.gather(1, path.clamp(min=0))[moved]
    targets = slots[:, : path.shape[1]][moved]
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer[targets] = buffer[sources]  # everything is read before anything is written
