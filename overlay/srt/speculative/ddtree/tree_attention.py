# SPDX-License-Identifier: Apache-2.0
"""The attention of verify and draft steps by a kernel made for few rows, in the place of SGLang's for long prompts.

SGLang's Triton backend verifies with the kernel of its prefill: 128 rows a program for one head of one request, of
which a chain of 16 tokens fills an eighth, and every head reads its group's keys again. This one computes the same.
Whatever it does not know (windows, sinks, caps, float8, other shapes) goes on to SGLang's.

On an H200 it gives what float64 gives, as nearly as SGLang's, and takes a half to a twentieth of the time
(`benchmarks/attention_times.py`).
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from sglang.srt.utils.common import is_cuda


logger = logging.getLogger(__name__)

#: Set to 0: steps of trees and blocks by SGLang's kernel.
VARIABLE = "SGLANG_DDTREE_ATTENTION"
#: No GPU before has been tried; the largest blocks do not fit into the shared memory of compute capability 7.5.
_CAPABILITY = (8, 0)
#: SGLang's names of the arguments that `Call` takes by their places, and of the one behind them.
_PLACES = (
    *("q_extend", "k_extend", "v_extend", "o_extend", "k_buffer", "v_buffer", "qo_indptr", "kv_indptr", "kv_indices"),
    *("custom_mask", "is_causal", "mask_indptr", "max_len_extend", "k_scale", "v_scale", "sm_scale"),
)
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
#: Further arguments that may be anything: slots are of tokens, whatever the pages.
_SERVED = ("sm_scale", "page_size")


def use_tree_attention(backend: Any) -> None:
    """Let a Triton attention backend verify and draft by the overlay's kernel, unless that is turned off.

    Called where the backend prepares for CUDA graphs: without graphs SGLang's kernel stays.
    """
    why_not = _why_not(backend)
    if why_not:
        logger.info("DDTREE: steps attend by SGLang's kernel: %s.", why_not)
    elif not isinstance(backend.extend_attention_fwd, TreeAttention):
        backend.extend_attention_fwd = TreeAttention(backend.extend_attention_fwd)


def _why_not(backend: Any) -> str:
    """Why a backend keeps SGLang's kernel; empty where it does not."""
    if os.environ.get(VARIABLE) == "0":
        return f"{VARIABLE}=0"
    # Where another maker's devices pass as CUDA's (MUSA), PyTorch alone would not tell.
    if not is_cuda() or torch.cuda.get_device_capability() < _CAPABILITY:
        return "this is no NVIDIA GPU of compute capability {}.{} or later".format(*_CAPABILITY)
    if isinstance(backend.extend_attention_fwd, TreeAttention):
        return ""
    unknown = unknown_arguments(backend.extend_attention_fwd)
    return f"it takes arguments that the overlay does not know ({', '.join(unknown)})" if unknown else ""


def unknown_arguments(extend: Callable[..., Any]) -> list[str]:
    """Names of arguments that SGLang's function has and that nobody has read, or that stand in another place."""
    names = list(inspect.signature(extend).parameters)
    places = [name for name, known in zip(names, _PLACES, strict=False) if name != known]
    return places + [name for name in names[len(_PLACES) :] if name not in _NEUTRAL and name not in _SERVED]


class TreeAttention:
    """Stands in the place of SGLang's `extend_attention_fwd` and takes its arguments.

    Args:
        extend: SGLang's function, for whatever is no step of trees or blocks.
    """

    def __init__(self, extend: Any) -> None:
        self._extend = extend
        self._told: set[bool] = set()

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Attention of a batch; the output is written."""
        call = Call.of(args, kwargs)
        is_ours = call is not None and serves(call)
        if call is not None and call.mask is not None and is_ours not in self._told:
            self._told.add(is_ours)
            whose = "the overlay's" if is_ours else "SGLang's"
            logger.info("DDTREE: steps of %s tokens a request attend by %s kernel.", call.width, whose)
        if call is None or not is_ours:
            return self._extend(*args, **kwargs)
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
        places = len(_PLACES) - 1
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
        if name not in _SERVED and not _is_one_of(value, _NEUTRAL.get(name, ())):
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
        and k.shape == v.shape
        and k.shape[1] == call.k_buffer.shape[1] == call.v_buffer.shape[1]
        and q.shape[1] % k.shape[1] == 0
        and q.shape[1] == call.out.shape[1]
        and isinstance(call.width, int)
        and 0 < q.shape[0] == batch * call.width == k.shape[0] <= call.out.shape[0]
        and len(call.kv_indptr) == batch + 1
        and _is_one_of(call.k_scale, (None, 1.0))
        and _is_one_of(call.v_scale, (None, 1.0))
    )


def _is_one_of(value: Any, known: tuple[Any, ...]) -> bool:
    """Without asking a tensor whether it is equal to a number."""
    return any(value is other or (isinstance(value, (int, float)) and value == other) for other in known)
