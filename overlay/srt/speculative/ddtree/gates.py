# SPDX-License-Identifier: Apache-2.0
"""Checks that need the loaded model or the real pools, and the CUDA graph buffers that a tree's width needs."""

from __future__ import annotations

from typing import Any

import torch

from sglang.srt.speculative.ddtree.args import DDTREE, check_hybrid, verify_width


def check_model_runner(model_runner: Any) -> None:
    """Refuse a loaded target that a tree cannot be verified with.

    Raises:
        ValueError: The model has sliding-window layers, recurrent layers without the unsafe flag, or a KV pool too small
            for one tree and one draft block.
    """
    server_args = model_runner.server_args
    if model_runner.sliding_window_size:
        raise ValueError(
            f"DDTREE does not serve models with sliding-window attention (window {model_runner.sliding_window_size}): the "
            "window would be measured from a node's slot instead of its position. Use --speculative-algorithm DFLASH."
        )
    if model_runner.mambaish_config is not None:
        check_hybrid(server_args, type(model_runner.model).__name__)
    width, block_size = verify_width(server_args), int(server_args.speculative_dflash_block_size)
    room = int(model_runner.max_total_num_tokens)
    if max(width, block_size) + 1 > room:
        raise ValueError(
            f"DDTREE needs {max(width, block_size)} free KV slots for one request's step, but the pool holds {room} tokens. "
            "Lower --speculative-ddtree-budget or raise --mem-fraction-static."
        )


def check_graph_buffers(backend: Any, max_bs: int, max_num_tokens: int) -> None:
    """Refuse a budget whose CUDA graph buffers cannot fit before any of them is allocated. Does nothing without DDTREE.

    Args:
        backend: SGLang's Triton attention backend.
        max_bs: Largest captured batch size.
        max_num_tokens: `max_bs` times the width.

    Raises:
        ValueError: The buffers are larger than the free memory; the text names the largest budget that fits.
    """
    if not _ddtree_is_on() or not torch.cuda.is_available():
        return
    free, _ = torch.cuda.mem_get_info()
    needed = graph_buffer_bytes(backend, max_num_tokens)
    if needed > free:
        per_node = graph_buffer_bytes(backend, max_bs)
        raise ValueError(
            f"DDTREE: CUDA graphs for {max_bs} requests of {max_num_tokens // max_bs} tokens need {needed / 2**30:.1f} GiB of "
            f"attention buffers, {free / 2**30:.1f} GiB are free. Lower --speculative-ddtree-budget (at most "
            f"{max(0, free // per_node - 1)} fits), --cuda-graph-max-bs or --context-length."
        )


def graph_buffer_bytes(backend: Any, num_tokens: int) -> int:
    """Bytes that the Triton backend allocates for graphs of `num_tokens` tokens: partial attention, KV indices, mask."""
    partials = backend.num_head * backend.max_kv_splits * (backend.v_head_dim + 1) * 4
    kv_indices = backend.max_context_len * 8
    mask = backend.max_context_len + backend.num_draft_tokens
    return int(num_tokens) * (partials + kv_indices + mask)


def grow_graph_mask(backend: Any, max_num_tokens: int) -> torch.Tensor:
    """The graph mask buffer with room for the tree itself.

    SGLang sizes it for the prefix alone. A full batch at the end of the context needs the verify width on top; copying its
    mask would fail.
    """
    mask: torch.Tensor = backend.cuda_graph_custom_mask
    if not _ddtree_is_on():
        return mask
    return mask.new_zeros(int(max_num_tokens) * (backend.max_context_len + backend.num_draft_tokens))


def _ddtree_is_on() -> bool:
    from sglang.srt.server_args import get_global_server_args

    return bool(get_global_server_args().speculative_algorithm == DDTREE)
