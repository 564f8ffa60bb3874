# SPDX-License-Identifier: Apache-2.0
"""Which target can verify a tree, told from the loaded model: what SGLang made of the backend that was asked for.

The arguments name an attention backend. A model may wrap it in another or put its own in its place, a build for AMD
takes kernels that know of no mask, and some models keep state that follows the rows of a batch. None of that shows in
the arguments.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.speculative.ddtree.proven import TREE_ATTENTION_BACKENDS


#: The classes behind TREE_ATTENTION_BACKENDS, by name and exactly: a subclass may do something else.
_CLASSES = {"triton": "TritonAttnBackend", "flashinfer": "FlashInferAttnBackend", "fa3": "FlashAttentionBackend"}
#: Around them: one backend for each role, or one for full attention beside kernels that read the tree's links.
_WRAPPERS = {
    "HybridAttnBackend": ("prefill_backend", "decode_backend"),
    "HybridLinearAttnBackend": ("full_attn_backend",),
}


def check_target(model_runner: Any) -> None:
    """Refuse a target whose layers do not all verify a tree.

    Args:
        model_runner: The target's, with its attention backend built.

    Raises:
        ValueError: What cannot be served, and why.
    """
    if torch.version.hip is not None:
        raise ValueError(
            "DDTREE does not run on ROCm: SGLang's Triton backend verifies a chain there without looking at the mask. "
            "Use --speculative-algorithm DFLASH."
        )
    if getattr(model_runner, "use_mla_backend", False):
        raise ValueError("DDTREE does not support MLA models yet: their tree verify is not proven.")
    proven = [_CLASSES[name] for name in TREE_ATTENTION_BACKENDS]
    for found in _classes(model_runner.attn_backend):
        if found not in proven:
            raise ValueError(
                f"DDTREE cannot verify a tree with {found}, which SGLang chose for this model: it is proven for "
                f"{', '.join(proven)} only. Use --speculative-algorithm DFLASH."
            )
    state = _state_by_row(model_runner)
    if state is not None:
        raise ValueError(
            f"DDTREE does not serve models with {state}: it follows the rows of a batch, not the branches of a tree. "
            "Use --speculative-algorithm DFLASH."
        )


def _classes(backend: Any) -> list[str]:
    name = type(backend).__name__
    if name not in _WRAPPERS:
        return [name]
    return [found for part in _WRAPPERS[name] for found in _classes(getattr(backend, part))]


def _state_by_row(model_runner: Any) -> str | None:
    manager = getattr(model_runner, "ngram_embedding_manager", None)
    if getattr(model_runner, "use_ngram_embedding", False) or getattr(manager, "enabled", False):
        return "n-gram embeddings"
    pool = model_runner.req_to_token_pool
    for name, what in (("ngram_pool", "an n-gram context"), ("short_conv_pool", "short convolutions")):
        if getattr(getattr(pool, name, None), "enabled", False):
            return what
    return None
