# SPDX-License-Identifier: Apache-2.0
"""Memory that is free while the target's graphs are captured, and not to be had: the drafter is loaded after them."""

from __future__ import annotations

from typing import Any

from sglang.srt.configs.model_config import ModelConfig


def promised_bytes(model_runner: Any) -> int:
    """Bytes of the drafter's weights and of its KV pool.

    SGLang left room for the pool when it sized the target's: as many slots, fewer layers. The weights come out of what
    it leaves for graphs and the work of a step.

    Args:
        model_runner: The target's, with its pool.
    """
    known = getattr(model_runner, "ddtree_drafter_bytes", None)
    if known is None:
        known = model_runner.ddtree_drafter_bytes = _weights_of(model_runner)
    pool = model_runner.token_to_kv_pool
    if not hasattr(pool, "k_buffer"):
        return int(known)  # a kind that is refused once the drafter is loaded
    of_target = sum(buffer.nbytes for buffer in (*pool.k_buffer, *pool.v_buffer))
    return int(known) + of_target * int(model_runner.dflash_draft_num_layers) // len(pool.k_buffer)


def drafter_parameters(config: Any, features: int, ranks: int) -> tuple[int, int]:
    """Numbers that one rank holds of a drafter: its weights, and the copy of those of keys and values.

    Args:
        config: The drafter's Hugging Face config.
        features: Layers of the target that it reads.
        ranks: Tensor-parallel ranks; what joins the features is whole on each.
    """
    hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or hidden // heads)
    kv_heads = int(getattr(config, "num_key_value_heads", heads))
    query, keys = heads * head_dim // ranks, max(1, kv_heads // ranks) * head_dim
    attention = (2 * query + 2 * keys) * hidden + 2 * head_dim
    layer = attention + 3 * hidden * int(config.intermediate_size) // ranks + 2 * hidden
    layers = int(config.num_hidden_layers)
    return layers * layer + features * hidden * hidden + 2 * hidden, layers * 2 * keys * hidden


def _weights_of(model_runner: Any) -> int:
    """Bytes of the drafter's weights on this rank."""
    server_args = model_runner.server_args
    drafter = ModelConfig.from_server_args(
        server_args,
        model_path=server_args.speculative_draft_model_path,
        model_revision=server_args.speculative_draft_model_revision,
        is_draft_model=True,
    )
    features = len(model_runner.dflash_target_layer_ids)
    numbers = drafter_parameters(drafter.hf_config, features, int(model_runner.tp_size))
    return sum(numbers) * int(drafter.dtype.itemsize)
