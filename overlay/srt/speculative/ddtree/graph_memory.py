# SPDX-License-Identifier: Apache-2.0
"""Bytes of CUDA graph buffers that a verified node takes, and bytes that are free."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.speculative.ddtree.tree_mask import mask_columns


#: Layers that a drafter reads where a model runner does not say; no drafter of DFLASH's reads more.
_LAYERS = 8


def attention_bytes(backend: Any) -> int:
    """Bytes of a verified node in the Triton backend: partial attention and its logsumexp, and its row of the mask.

    The mask exists twice while it grows.
    """
    partials = backend.num_head * backend.max_kv_splits * (backend.v_head_dim + 1) * 4
    return int(partials) + 2 * mask_columns(backend)


def logits_bytes(vocab_size: int) -> int:
    """Bytes of a verified node's logits: as the graph hands them out, and at most so many as the model gives them."""
    return int(vocab_size) * 4


def hidden_bytes(model_runner: Any) -> int:
    """Bytes of a verified node's hidden states, those that the drafter reads.

    Args:
        model_runner: The target's.
    """
    config = getattr(model_runner, "spec_aux_config", model_runner)  # 0.5.16 and later
    layers = getattr(config, "dflash_target_layer_ids", None)
    count = len(layers) if layers else _LAYERS
    return int(model_runner.model_config.hidden_size) * count * int(model_runner.dtype.itemsize)


def grown_rows(counts: Iterable[int]) -> int:
    """Rows of all buffers together where each user takes one that is there, if it has room, and makes one otherwise."""
    total = most = 0
    for count in counts:
        if count > most:
            total, most = total + count, count
    return total


def free_bytes() -> int:
    """Free memory of this process's GPU; what PyTorch has cached can be used again."""
    return int(torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())
