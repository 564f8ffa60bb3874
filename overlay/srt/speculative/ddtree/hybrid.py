# SPDX-License-Identifier: Apache-2.0
"""Models with recurrent layers: which of them a GPU has shown to keep a state per tree node, and what is refused."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from sglang.srt.speculative.ddtree.backends import backends_of
from sglang.srt.speculative.ddtree.cached_states import recurrent_strategy
from sglang.srt.speculative.ddtree.proven import RECURRENT_LAYERS_RAN
from sglang.srt.speculative.ddtree.settings import reading


if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)


def is_hybrid_config(config: object) -> bool:
    """Whether a Hugging Face config is of a model with recurrent layers: SGLang gives those a state-cache layout."""
    parts = (config, getattr(config, "text_config", None), getattr(config, "llm_config", None))
    return any(hasattr(type(part), "mamba2_cache_params") for part in parts)


def hybrid_risk(server_args: ServerArgs, config: object) -> str | None:
    """What may make a hybrid model's output differ from its own under DDTREE; None for what a GPU has shown.

    Args:
        config: The model's Hugging Face config.
    """
    parts = (config, getattr(config, "text_config", None), getattr(config, "llm_config", None))
    if not any(hasattr(part, "linear_key_head_dim") for part in parts):
        return "its recurrent layers are not GDN, and of other kernels it is not shown that they keep a state per node"
    found = reading(server_args)
    base = found.linear_attn_backend
    kernels = {found.linear_attn_decode_backend or base, found.linear_attn_prefill_backend or base}
    if kernels != {"triton"}:
        return f"of the linear attention backend {' and '.join(sorted(kernels))} only triton's kernels read a tree"
    strategy = recurrent_strategy(server_args)
    if strategy not in ("auto", "no_buffer"):
        return f"the strategy {strategy} for recurrent states in the prefix cache keeps states that a tree step crosses"
    if not RECURRENT_LAYERS_RAN:
        return "GDN kernels are shown to keep a state per node one by one, but in this release not in a whole engine"
    settings = {
        "an attention backend other than triton": set(backends_of(found)) != {"triton"},
        f"--page-size {found.page_size}": int(found.page_size or 1) > 1,
        "a prefix cache (no --disable-radix-cache)": not found.disable_radix_cache,
    }
    unproven = [setting for setting, given in settings.items() if given]
    return f"recurrent layers were not run in a whole engine with {' and '.join(unproven)}" if unproven else None


def check_hybrid(server_args: ServerArgs, model_name: str, config: object) -> None:
    """Refuse a hybrid model of a kind that no GPU has shown, unless the user accepted that its output may differ.

    Raises:
        ValueError: The unsafe flag is not set.
    """
    risk = hybrid_risk(server_args, config)
    if risk is None:
        return
    if not reading(server_args).speculative_ddtree_allow_hybrid_unsafe:
        raise ValueError(
            f"DDTREE is not proven to serve {model_name} losslessly: {risk}. Use --speculative-algorithm DFLASH, or "
            "accept that the output may differ with --speculative-ddtree-allow-hybrid-unsafe."
        )
    logger.warning("DDTREE: the output of %s may differ from its own (unsafe flag set): %s.", model_name, risk)


def check_tracked_states(server_args: ServerArgs, width: int) -> None:
    """Refuse ways of keeping recurrent states for the prefix cache that lose some of a tree step's, flag or no flag."""
    if recurrent_strategy(server_args) == "extra_buffer_lazy":
        raise ValueError("DDTREE does not support the lazy extra buffer for recurrent states. Use no_buffer.")
    interval = int(reading(server_args).mamba_track_interval)
    if interval < width:
        raise ValueError(
            f"DDTREE: a step of {width} tokens crosses more than one tracked recurrent state (every {interval}). "
            f"Set --speculative-ddtree-budget to {interval - 1} or less."
        )
