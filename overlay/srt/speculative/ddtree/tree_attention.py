# SPDX-License-Identifier: Apache-2.0
"""The attention of verify and draft steps by a kernel made for few rows, in the place of SGLang's for long prompts.

SGLang's Triton backend verifies with the kernel of its prefill: 128 rows a program for one head of one request, of
which a chain of 16 tokens fills an eighth, and every head reads its group's keys again. This one computes the same.
Whatever it does not know (windows, sinks, caps, float8, other shapes) goes on to SGLang's.

On an H200 it gives what float64 gives, as nearly as SGLang's, and takes a half to a twentieth of the time
(`benchmarks/attention_times.py`).
"""

from __future__ import annotations

import logging
import os
from typing import Any, NamedTuple

import torch


logger = logging.getLogger(__name__)

#: Set to 0: steps of trees and blocks by SGLang's kernel.
VARIABLE = "SGLANG_DDTREE_ATTENTION"
#: Further arguments of SGLang's function, by what they are where nothing is asked for.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "logit_cap": (0.0, None),
    "skip_prefix_custom_mask": (True,),
    "sliding_window_size": (-1, None),
    "sinks": (None,),
    "window_kv_offsets": (None,),
    "xai_temperature_len": (-1, 0, None),
    "lse_extend": (None,),
    "skip_prefix": (False,),
    "skip_extend": (False,),
    "score_mod": (None,),
    "aux_tensors": (None,),
    "extend_seq_lens_cpu": (None,),
    "identity_kv_indices": (False,),
}


def use_tree_attention(backend: Any) -> None:
    """Let a Triton attention backend verify and draft by the overlay's kernel, unless that is turned off."""
    if not torch.cuda.is_available() or torch.version.hip or os.environ.get(VARIABLE) == "0":
        return
    if not isinstance(backend.extend_attention_fwd, TreeAttention):
        backend.extend_attention_fwd = TreeAttention(backend.extend_attention_fwd)


class TreeAttention:
    """Stands in the place of SGLang's `extend_attention_fwd` and takes its arguments.

    Args:
        extend: SGLang's function, for whatever is no step of trees or blocks.
    """

    def __init__(self, extend: Any) -> None:
        self._extend = extend
        self._has_told = False

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Attention of a batch; the output is written."""
        call = Call.of(args, kwargs)
        if call is None or not serves(call):
            return self._extend(*args, **kwargs)
        if not self._has_told and call.mask is not None:
            self._has_told = True
            logger.info("DDTREE: steps of %d tokens a request attend by the overlay's kernel.", call.width)
        from sglang.srt.speculative.ddtree.attention_kernel import attend_by_kernel

        scale = call.further.get("sm_scale")
        attend_by_kernel(
            call.q, call.k, call.v, call.out, call.k_buffer, call.v_buffer, call.kv_indptr, call.kv_indices,
            call.mask, call.mask_indptr, width=call.width, scale=call.q.shape[-1] ** -0.5 if scale is None else scale,
        )  # fmt: skip
        return None


class Call(NamedTuple):
    """The arguments of SGLang's function: those that it takes by their places, and the others by their names."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    k_buffer: torch.Tensor
    v_buffer: torch.Tensor
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    mask: torch.Tensor | None
    is_causal: bool
    mask_indptr: torch.Tensor | None
    width: int
    k_scale: float | None
    v_scale: float | None
    further: dict[str, Any]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """The arguments of a call; None where they stand otherwise than SGLang's backend passes them."""
        places = len(cls._fields) - 1
        if not places <= len(args) <= places + 1:
            return None
        return cls(*args[:places], further=kwargs | ({"sm_scale": args[places]} if len(args) > places else {}))


def serves(call: Call) -> bool:
    """Whether a call is a step of as many rows for every request that we know all of.

    A tree has a mask, a drafter's block has none and is not causal; anything else is a prompt.
    """
    if call.mask is None and call.is_causal:
        return False
    for name, value in call.further.items():
        # Slots are of tokens, whatever the pages.
        if name not in ("sm_scale", "page_size") and not _is_one_of(value, _NEUTRAL.get(name, ())):
            return False
    if call.mask is not None and (call.mask_indptr is None or call.mask.element_size() != 1):
        return False
    q, k, v, size = call.q, call.k, call.v, call.q.shape[-1]
    tensors = (q, k, v, call.out, call.k_buffer, call.v_buffer)
    batch = len(call.qo_indptr) - 1
    return (
        q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and all(t.dtype == q.dtype and t.dim() == 3 and t.shape[-1] == size and t.stride(2) == 1 for t in tensors)
        and size & (size - 1) == 0
        and 16 <= size <= 256
        and k.stride() == v.stride()
        and k.shape[1] == call.k_buffer.shape[1] == call.v_buffer.shape[1]
        and q.shape[1] % k.shape[1] == 0
        and q.shape[0] == batch * call.width == k.shape[0]
        and len(call.kv_indptr) == batch + 1
        and call.k_scale in (None, 1.0)
        and call.v_scale in (None, 1.0)
    )


def _is_one_of(value: Any, known: tuple[Any, ...]) -> bool:
    """Without asking a tensor whether it is equal to a number."""
    return any(value is other or (isinstance(value, (int, float)) and value == other) for other in known)
