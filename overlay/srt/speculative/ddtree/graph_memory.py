# SPDX-License-Identifier: Apache-2.0
"""Bytes of CUDA graph buffers that a verified node takes, and bytes that are free."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.speculative.ddtree.tree_mask import mask_columns


def node_bytes(model_runner: Any) -> int:
    """Bytes of graph buffers that one more verified node takes, with SGLang's Triton backend."""
    return attention_bytes(model_runner.attn_backend) + logits_bytes(model_runner.model_config.vocab_size)


def attention_bytes(backend: Any) -> int:
    """Bytes of a verified node in the Triton backend: partial attention and its logsumexp, and its row of the mask.

    The mask exists twice while it grows.
    """
    partials = backend.num_head * backend.max_kv_splits * (backend.v_head_dim + 1) * 4
    return int(partials) + 2 * mask_columns(backend)


def logits_bytes(vocab_size: int) -> int:
    """Bytes of a verified node's logits: as the model gives them, and as the graph keeps them."""
    return int(vocab_size) * (4 + 4)


def free_bytes() -> int:
    """Free memory of this process's GPU; what PyTorch has cached can be used again."""
    return int(torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())
