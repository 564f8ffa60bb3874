# SPDX-License-Identifier: Apache-2.0
"""Draft KV of a step's tokens in the first worker, launched without asking the device for a number.

SGLang's fused kernels serve, but not the function around them: it reads the largest position back before it launches
anything, and so would wait for the target's verify pass that the step has just launched. The host knows a bound.
"""

from __future__ import annotations

import logging
from typing import Any

import torch


logger = logging.getLogger(__name__)


def append_draft_kv(
    worker: Any, context: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, *, longest: int
) -> None:
    """Write draft KV of every row, with SGLang's fused kernels where it has them and they work.

    Args:
        worker: DFLASH's.
        context: The drafter's projection of the target's hidden states, [rows, hidden].
        positions: int64 [rows].
        slots: int64 [rows].
        longest: A position that none of them is above.
    """
    if worker._use_fused_kv_materialize and worker._fused_kv_helper is not None:
        try:
            _append_fused(worker, context, positions, slots, longest)
        except Exception as error:  # (whatever SGLang's kernels raise; SGLang goes on in the same way)
            logger.warning("DDTREE: the fused draft KV failed; it is written layer by layer from here on: %s", error)
            worker._use_fused_kv_materialize, worker._fused_kv_helper = False, None
        else:
            return
    worker._append_target_hidden_sequential(context, positions, slots)


def _append_fused(
    worker: Any, context: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, longest: int
) -> None:
    """What SGLang's helper launches: one product for all layers, then norm, rotation and pool a layer.

    Raises:
        RuntimeError: The rotary table ends before `longest`.
    """
    from sglang.srt.speculative.triton_ops.fused_kv_materialize import _fused_norm_rope

    helper, pool = worker._fused_kv_helper, worker.draft_model_runner.token_to_kv_pool
    grow = getattr(helper.rotary_emb, "_ensure_cos_sin_cache_length", None)
    if grow is not None:
        grow(longest)  # SGLang has reserved more than a context at start-up, so that it is long enough
    table = helper.rotary_emb.cos_sin_cache
    if longest >= table.shape[0]:
        raise RuntimeError(f"the rotary table has {table.shape[0]} positions, {longest} may be needed")
    table = table.to(context.device)
    both = torch.einsum("rh,lkh->lrk", context, helper.batched_kv_weight)
    for number, layer in enumerate(worker.draft_model.layers):
        keys, values = _fused_norm_rope(
            both[number],
            helper.k_norm_weights[number],
            table,
            positions,
            helper.num_kv_heads,
            helper.head_dim,
            helper.rotary_dim,
            helper.eps_values[number],
        )
        attention = layer.self_attn.attn
        pool.set_kv_buffer(attention, slots, keys, values, attention.k_scale, attention.v_scale)
