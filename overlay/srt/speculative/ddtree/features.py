# SPDX-License-Identifier: Apache-2.0
"""What DDTREE is refused with until somebody has proven that a tree and it go together."""

from __future__ import annotations

import logging
import os
from typing import Any


logger = logging.getLogger(__name__)

#: Features whose interplay with a tree is not proven: the field, the value that leaves it off, its flag.
_UNPROVEN_FEATURES = (
    ("disaggregation_mode", "null", "--disaggregation-mode"),
    ("enable_two_batch_overlap", False, "--enable-two-batch-overlap"),
    ("enable_pdmux", False, "--enable-pdmux"),
    ("enable_lora", False, "--enable-lora"),
    # Host copies hold the target's KV only: a reloaded prefix would be drafted from garbage.
    ("enable_hierarchical_cache", False, "--enable-hierarchical-cache"),
    ("enable_lmcache", False, "--enable-lmcache"),
    ("enable_flexkv", False, "--enable-flexkv"),
    ("radix_cache_backend", None, "--radix-cache-backend"),
    # Pools and caches with layouts of their own, in which no test has moved the KV of accepted nodes.
    ("enable_unified_memory", False, "--enable-unified-memory"),
    ("enable_page_major_kv_layout", False, "--enable-page-major-kv-layout"),
    ("enable_kv_cache_sharding", False, "--enable-kv-cache-sharding"),
    ("enable_hisparse", False, "--enable-hisparse"),
    # What they record per KV slot stays behind when an accepted node's KV moves.
    ("enable_return_routed_experts", False, "--enable-return-routed-experts"),
    ("enable_return_indexer_topk", False, "--enable-return-indexer-topk"),
    # A step's hidden states are those of all nodes, not those of the tokens that were kept.
    ("enable_return_hidden_states", False, "--enable-return-hidden-states"),
    ("enable_return_aux_hidden_states", False, "--enable-return-aux-hidden-states"),
    # Recurrent states that are computed anew along a chain.
    ("enable_linear_replayssm", False, "--enable-linear-replayssm"),
    ("enable_linear_replayssm_spec", False, "--enable-linear-replayssm-spec"),
    ("enable_gdn_replayssm_spec", False, "--enable-gdn-replayssm-spec"),
    # Kernels that take a step in SGLang's place and know of no mask.
    ("enable_nvidia_megakernel", False, "--enable-nvidia-megakernel"),
    ("enable_amd_monokernel", False, "--enable-amd-monokernel"),
    ("enable_layernorm_sp", False, "--enable-layernorm-sp"),
    ("speculative_use_block_verification", False, "--speculative-use-block-verification"),
    ("enable_watermark", False, "--enable-watermark"),
    ("dcp_size", 1, "--dcp-size"),
    # Idle ranks would verify a batch of DFLASH's width.
    ("enable_dp_attention", False, "--enable-dp-attention"),
    ("attn_dp_size", 1, "--attn-dp-size"),
    ("attn_cp_size", 1, "--attention-context-parallel-size"),
    ("rl_on_policy_target", None, "--rl-on-policy-target"),
)


def check_features(server_args: Any) -> None:
    """Refuse what is not proven.

    Raises:
        ValueError: The text names the flag.
    """
    for field, off, flag in _UNPROVEN_FEATURES:
        if getattr(server_args, field, off) not in (off, None):
            raise ValueError(
                f"DDTREE does not support {flag} yet. Leave it out, or use --speculative-algorithm DFLASH."
            )
    simulated = os.environ.get("SGLANG_SIMULATE_ACC_LEN", "")
    if simulated and float(simulated) > 0:
        raise ValueError(
            f"DDTREE does not simulate an accept length (SGLANG_SIMULATE_ACC_LEN={simulated}): it would be ignored. "
            "Unset it."
        )


def warn_of_released_weights(server_args: Any) -> None:
    """Say at start-up what a release of the weights does to the drafter, which nobody would notice otherwise.

    SGLang drops the weights of both models and gives the target's back by an update; none of them reaches the drafter.
    """
    if server_args.enable_memory_saver and not server_args.enable_weights_cpu_backup:
        logger.warning(
            "DDTREE: --enable-memory-saver: a release of the weights (/release_memory_occupation without tags, or with "
            "the tag weights) drops the drafter's as well, and no weight update brings those back: the output stays "
            "the target's own, but no draft is accepted any more. Add --enable-weights-cpu-backup "
            "(--enable-draft-weights-cpu-backup may keep only a part of them), or release the other tags alone."
        )
