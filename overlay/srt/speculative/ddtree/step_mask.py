# SPDX-License-Identifier: Apache-2.0
"""A step's mask, in the place that the target's attention reads, and no more of it than is read."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.speculative.ddtree.mask_buffers import mask_buffer
from sglang.srt.speculative.ddtree.tree import Tree
from sglang.srt.speculative.ddtree.tree_mask import write_tree_mask


def step_mask(attn_backend: Any, tree: Tree, prefix_lens: torch.Tensor, cells: int) -> torch.Tensor:
    """Write a step's mask, if possible into the buffer that CUDA graphs read: SGLang's copy to itself is none.

    SGLang's Triton kernels attend to the whole prefix without asking the mask, but for the one of deterministic
    inference. The kernels that stand in for them on a CPU ask.

    Args:
        attn_backend: The target's.
        prefix_lens: Committed tokens of each request, integers [bs].
        cells: The mask's, or more; those behind the last request's are not to be read.

    Returns:
        uint8 or bool [cells].
    """
    backend = getattr(attn_backend, "full_attn_backend", attn_backend)
    is_triton = type(backend).__name__ == "TritonAttnBackend"
    buffer = mask_buffer(backend, prefix_lens.shape[0]) if is_triton else None
    out = torch.empty(cells, dtype=torch.bool, device=prefix_lens.device) if buffer is None else buffer[:cells]
    write_tree_mask(out, tree, prefix_lens, whole=not (is_triton and out.is_cuda) or bool(backend.enable_deterministic))
    return out
