# SPDX-License-Identifier: Apache-2.0
"""Checks that need the loaded model or the real pools, and the CUDA graph buffers that a tree's width needs."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.speculative.ddtree.args import DDTREE, draft_width, verify_width
from sglang.srt.speculative.ddtree.backends import check_attention
from sglang.srt.speculative.ddtree.budgets import DEFAULT_BUDGET, budgets
from sglang.srt.speculative.ddtree.default_budget import RECURRENT, narrower
from sglang.srt.speculative.ddtree.graph_memory import attention_bytes, free_bytes
from sglang.srt.speculative.ddtree.hybrid import check_hybrid
from sglang.srt.speculative.ddtree.lane_bytes import NodeBytes, lanes_bytes, planned
from sglang.srt.speculative.ddtree.promised import promised_bytes
from sglang.srt.speculative.ddtree.published import schedule, spec
from sglang.srt.speculative.ddtree.recurrent import is_recurrent
from sglang.srt.speculative.ddtree.settings import reading
from sglang.srt.speculative.ddtree.tree_attention import use_tree_attention
from sglang.srt.speculative.ddtree.tree_mask import mask_columns


def check_model_runner(model_runner: Any) -> None:
    """Refuse a loaded target that a tree cannot be verified with.

    Raises:
        ValueError: Attention that no backend can restrict to a tree, or recurrent layers without the unsafe flag or
            with several budgets.
    """
    server_args = model_runner.server_args
    check_attention(model_runner)
    if is_recurrent(model_runner):
        check_hybrid(server_args, type(model_runner.model).__name__, model_runner.model_config.hf_config)
        if len(budgets(reading(server_args))) > 1:
            raise ValueError(f"DDTREE: {RECURRENT.reason}. Use --speculative-ddtree-budget {DEFAULT_BUDGET} alone.")


def check_recurrent_memory(state_bytes: int, free_gib: float) -> None:
    """Refuse a budget whose recurrent states leave no memory for anything else.

    Recurrent layers keep one state per node of every request, whether it is accepted or not.

    Args:
        state_bytes: One request's state in all layers.
        free_gib: What SGLang has left for states and KV together.

    Raises:
        ValueError: The states of all nodes do not fit; the text names the largest budget that does.
    """
    if not is_ddtree_on():
        return
    limits = schedule()
    requests, width = int(limits.max_running_requests), verify_width(spec())
    if limits.max_mamba_cache_size is not None:
        requests = min(requests, int(limits.max_mamba_cache_size))
    needed = state_bytes * requests * width / 2**30
    if needed >= free_gib:
        fits = max(0, int(free_gib * 2**30 / (state_bytes * requests)) - 1)
        raise ValueError(
            f"DDTREE: the recurrent states of {width} nodes of {requests} requests need {needed:.1f} GiB, "
            f"{free_gib:.1f} GiB are left. {narrower(spec(), fits)}, or lower --max-running-requests."
        )


def prepare_graph_buffers(
    backend: Any, max_bs: int, max_num_tokens: int, kv_indices: torch.Tensor | None
) -> torch.Tensor | None:
    """Check that the CUDA graph buffers of a tree's width fit, keep the largest of them small; choose the kernel.

    SGLang gives every verified token of a batch a row of KV indices as long as the context. Tree verify reads one such
    row a request, for the prefix; at a budget of 64 that is 65 times less. With overlap scheduling a step is launched
    before the one before it is counted, so a prefix may run a block past the context. Without DDTREE nothing changes.

    Args:
        backend: SGLang's Triton attention backend, before its graph buffers are allocated.
        max_bs: Largest captured batch size.
        max_num_tokens: `max_bs` times the width.
        kv_indices: The buffer that the caller brought, if any.

    Returns:
        The buffer to use for KV indices, int64 [max_bs * (context + block)], or `kv_indices` as it was.

    Raises:
        ValueError: The buffers are larger than the free memory; the text names the largest budget that fits.
    """
    if not is_ddtree_on():
        return kv_indices
    use_tree_attention(backend)
    columns = backend.max_context_len + draft_width()
    _check_free_memory(max_bs, max_num_tokens, per_node=attention_bytes(backend), request=columns * 8)
    if kv_indices is not None:
        return kv_indices
    return torch.zeros(max_bs * columns, dtype=torch.int64, device=backend.device)


def prepare_flashinfer_buffers(
    backend: Any, max_bs: int, max_num_tokens: int, kv_indices: torch.Tensor | None
) -> torch.Tensor | None:
    """The same for FlashInfer, whose row of KV indices covers prefix and tree.

    Its mask needs no more room: SGLang gives it a byte for every bit that FlashInfer packs.

    Args:
        backend: SGLang's FlashInfer attention backend, before its graph buffers are allocated.
        max_bs: Largest captured batch size.
        max_num_tokens: `max_bs` times the width.
        kv_indices: The buffer that the caller brought, if any.

    Returns:
        The buffer to use for KV indices, int32 [max_bs * (context + width)], or `kv_indices` as it was.

    Raises:
        ValueError: As in `prepare_graph_buffers`.
    """
    if not is_ddtree_on() or kv_indices is not None:
        return kv_indices
    columns = backend.max_context_len + max_num_tokens // max_bs
    _check_free_memory(max_bs, max_num_tokens, per_node=backend.max_context_len, request=columns * 4)
    return torch.zeros(max_bs * columns, dtype=torch.int32, device=backend.kv_indptr[0].device)


def check_flash_attention_buffers(backend: Any, max_bs: int, max_num_tokens: int) -> None:
    """Check that FlashAttention's graph buffers fit: a row of slots per node, six page tables a request.

    Args:
        backend: SGLang's FlashAttention backend, before its graph buffers are allocated.
        max_bs: Largest captured batch size.
        max_num_tokens: `max_bs` times the width.

    Raises:
        ValueError: As in `prepare_graph_buffers`.
    """
    if is_ddtree_on():
        tables = 6 * backend.max_context_len * 4
        _check_free_memory(max_bs, max_num_tokens, per_node=4 * (max_num_tokens // max_bs + 3), request=tables)


def grow_graph_mask(backend: Any, max_num_tokens: int) -> torch.Tensor:
    """The graph mask buffer with room for the tree itself, uint8 [max_num_tokens * `mask_columns`].

    SGLang sizes it for the prefix alone. A full batch at the end of the context needs the verify width on top, and with
    overlap scheduling a block; copying its mask would fail.
    """
    mask: torch.Tensor = backend.cuda_graph_custom_mask
    if not is_ddtree_on():
        return mask
    return mask.new_zeros(int(max_num_tokens) * mask_columns(backend))


def _check_free_memory(max_bs: int, max_num_tokens: int, *, per_node: int, request: int) -> None:
    """Refuse graphs of the widest lane for which the free memory is too small; the others lie in its buffers.

    Args:
        per_node: Bytes of attention buffers per verified node; logits and hidden states come on top.
        request: Bytes of attention buffers per request, whatever its width.
    """
    graphs, width = planned(), max_num_tokens // max_bs
    if not torch.cuda.is_available() or graphs is None or width != verify_width(spec()):
        return  # the draft runner, or a narrower lane
    node = NodeBytes.with_attention(graphs.model_runner, buffers=per_node, request=request)
    needed, fixed, with_one = (lanes_bytes([(nodes, graphs.batch_sizes)], node) for nodes in (width, 0, 1))
    promised = promised_bytes(graphs.model_runner)
    free = free_bytes() - promised
    if needed > free:
        fits = max(0, (free - fixed) // (with_one - fixed) - 1)
        beside = f" beside the drafter's weights and KV ({promised / 2**30:.1f} GiB)" if promised else ""
        raise ValueError(
            f"DDTREE: CUDA graphs for {max_bs} requests of {width} tokens need {needed / 2**30:.1f} GiB of attention "
            f"buffers, logits and hidden states, {max(0, free) / 2**30:.1f} GiB are free{beside}. "
            f"{narrower(spec(), fits)}, or lower --cuda-graph-max-bs, --context-length or --mem-fraction-static."
        )


def is_ddtree_on() -> bool:
    """Whether this process serves with DDTREE."""
    return bool(spec().speculative_algorithm == DDTREE)
