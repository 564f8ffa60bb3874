# SPDX-License-Identifier: Apache-2.0
"""A step's mask, in the place that the target's attention reads, and no more of it than is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.speculative.ddtree.mask_buffers import mask_buffer
from sglang.srt.speculative.ddtree.tree import Tree
from sglang.srt.speculative.ddtree.tree_mask import write_tree_mask


@dataclass(frozen=True)
class StepMask:
    """A step's mask on its way: `build_tree` writes what a backend needs that asks for tails alone."""

    #: uint8 or bool; the cells behind the last request's are not to be read.
    out: torch.Tensor
    #: Whether the backend reads the cells of the prefix as well.
    whole: bool

    @classmethod
    def of(cls, attn_backend: Any, prefix_lens: torch.Tensor, cells: int) -> StepMask:
        """The mask of a step, if possible in the buffer that CUDA graphs read: SGLang's copy to itself is none.

        SGLang's Triton kernels attend to the whole prefix without asking the mask, but for the one of deterministic
        inference. The kernels that stand in for them on a CPU ask.

        Args:
            attn_backend: The target's.
            prefix_lens: Committed tokens of each request, integers [bs].
            cells: The mask's, or more.
        """
        backend = getattr(attn_backend, "full_attn_backend", attn_backend)
        is_triton = type(backend).__name__ == "TritonAttnBackend"
        buffer = mask_buffer(backend, prefix_lens.shape[0]) if is_triton else None
        out = torch.empty(cells, dtype=torch.bool, device=prefix_lens.device) if buffer is None else buffer[:cells]
        return cls(out, whole=not (is_triton and out.is_cuda) or bool(backend.enable_deterministic))

    @property
    def tails(self) -> torch.Tensor | None:
        """What `build_tree` writes, or None where it has not to."""
        return None if self.whole else self.out

    def written(self, tree: Tree, prefix_lens: torch.Tensor) -> torch.Tensor:
        """The mask with everything in it."""
        if self.whole:
            write_tree_mask(self.out, tree, prefix_lens, whole=True)
        return self.out
