# SPDX-License-Identifier: Apache-2.0
"""Which attention backends verify a tree, and why the others do not; `docs/backends.md` shows the same as a table.

A backend is in `TREE_ATTENTION_BACKENDS` only after `scripts/gpu_prove backends` has passed with it: greedy decoding
beside plain decoding with the same backend, and nodes that see their ancestors and nobody else.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.speculative.ddtree.proven import TREE_ATTENTION_BACKENDS
from sglang.srt.speculative.ddtree.settings import reading


#: The ones of them that were proven with KV stored in 8 bits.
FLOAT8_KV_BACKENDS = ("triton",)

_NO_VERIFY = "it has no verify step of its own: it would attend in order, whatever the mask"
_CHAINS = "its verify step is causal and takes no mask"
_SPARSE = "it attends to chosen blocks of a causal prefix and takes no mask"
_MLA = "it serves MLA models only, and DDTREE does not serve those"
_OTHER_HARDWARE = "it runs on hardware that no proof was run on"

#: Why not one of the others. A backend that is not named here was unknown when this was written.
WHY_NOT = {
    **dict.fromkeys(("flashinfer", "fa3"), "no tree was verified with it in this SGLang release"),
    "fa4": "it is the code of fa3 on other kernels, with which no tree was ever run",
    **dict.fromkeys(("torch_native", "flex_attention", "dual_chunk_flash_attn"), _NO_VERIFY),
    **dict.fromkeys(("trtllm_mha", "hpc_ops"), _CHAINS),
    **dict.fromkeys(("qsa", "minicpm_flashattn", "minicpm_flashinfer"), _SPARSE),
    "llada2_cfg_flashinfer": "it serves diffusion models only, whose decoding is not speculative",
    **dict.fromkeys(("trtllm_mla", "cutlass_mla", "flashmla", "tokenspeed_mla", "cutedsl_mla"), _MLA),
    **dict.fromkeys(("nsa", "dsa", "dsv4", "compressed"), _MLA),
    **dict.fromkeys(("aiter", "wave", "ascend", "intel_amx", "intel_xpu"), _OTHER_HARDWARE),
}

_UNKNOWN = "it is not known to this overlay"


def check_backends(server_args: Any) -> None:
    """Refuse a target backend that cannot verify a tree.

    With two backends (`--prefill-attention-backend`, `--decode-attention-backend`) SGLang verifies with the one that
    `--speculative-attention-mode` names; either has to be able to.

    Raises:
        ValueError: The text names the backend, its role, the reason and the supported ones.
    """
    for role, backend in zip(("prefill", "decode"), backends_of(server_args), strict=True):
        if backend not in TREE_ATTENTION_BACKENDS:
            raise ValueError(
                f"DDTREE cannot verify a tree with the {role} attention backend {backend!r}: "
                f"{WHY_NOT.get(backend, _UNKNOWN)}. "
                f"Supported: {', '.join(TREE_ATTENTION_BACKENDS)} (--attention-backend)."
            )


def check_attention(model_runner: Any) -> None:
    """Refuse a loaded target whose attention its backend cannot restrict to a tree.

    Raises:
        ValueError: Sliding windows, chunked attention, attention sinks with fa3, or 8-bit KV with an unproven backend.
    """
    window, config = model_runner.sliding_window_size, model_runner.model_config
    backends = backends_of(reading(model_runner.server_args))
    if window:
        raise ValueError(
            f"DDTREE does not serve models with sliding-window attention (window {window}): the window would be "
            "measured from a node's slot instead of its position. Use --speculative-algorithm DFLASH."
        )
    if config.is_local_attention_model:
        raise ValueError(
            "DDTREE does not serve models with chunked attention: no backend cuts a tree into chunks. "
            "Use --speculative-algorithm DFLASH."
        )
    if config.has_attention_sinks and "fa3" in backends:
        raise ValueError(
            "DDTREE does not serve models with attention sinks with fa3: it attends to prefix and tree one after the "
            "other and would count the sinks twice. Use --attention-backend triton."
        )
    unproven = [backend for backend in backends if backend not in FLOAT8_KV_BACKENDS]
    if unproven and model_runner.kv_cache_dtype.itemsize == 1:
        raise ValueError(
            f"DDTREE: KV of 8 bits is not proven with the attention backend {unproven[0]}. Supported: "
            f"{', '.join(FLOAT8_KV_BACKENDS)} (--attention-backend), or leave out --kv-cache-dtype."
        )


def backends_of(server_args: Any) -> tuple[str | None, str | None]:
    """The backends of prefill and decode, from arguments or from a view of them."""
    both = server_args.attention_backend
    return server_args.prefill_attention_backend or both, server_args.decode_attention_backend or both
