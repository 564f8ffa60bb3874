# SPDX-License-Identifier: Apache-2.0
"""Server arguments of DDTREE: flags, validation, and the widths that the rest of SGLang reads.

DFLASH has one width, DDTREE two. The draft model still drafts a block of `speculative_dflash_block_size` tokens
(bonus token included); the target verifies `speculative_ddtree_budget + 1` nodes (root included). Every pool, graph
and attention backend reads its width from `speculative_num_draft_tokens`, so that field holds the verify width on the
target and the block size on the draft worker's own copy of the arguments.
"""

from __future__ import annotations

import argparse
import copy
import logging
import os
from typing import TYPE_CHECKING, Any

from sglang.srt.speculative.ddtree.backends import TREE_ATTENTION_BACKENDS, backends_of, check_backends
from sglang.srt.speculative.ddtree.cached_states import recurrent_strategy
from sglang.srt.speculative.ddtree.model_facts import model_config, uses_mla
from sglang.srt.speculative.ddtree.proven import RECURRENT_LAYERS_RAN
from sglang.srt.speculative.ddtree.published import spec
from sglang.srt.speculative.ddtree.settings import reading, settle


if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

DDTREE = "DDTREE"

#: Draft nodes of a tree when the user says nothing; the field of `ServerArgs` has the same default.
DEFAULT_BUDGET = 64

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


def add_ddtree_cli_args(parser: argparse.ArgumentParser) -> None:
    """Add the DDTREE flags and admit DDTREE as a speculative algorithm.

    Args:
        parser: A parser that already has `--speculative-algorithm`.
    """
    for action in parser._actions:
        if action.dest == "speculative_algorithm" and action.choices is not None:
            action.choices = [*action.choices, DDTREE]
    parser.add_argument(
        "--speculative-ddtree-budget",
        type=int,
        default=DEFAULT_BUDGET,
        help="DDTREE only. Draft nodes per tree, root not counted; the target verifies budget + 1 tokens a step.",
    )
    parser.add_argument(
        "--speculative-ddtree-topk-cap",
        type=int,
        help="DDTREE only. Most tokens considered per draft position; 1 drafts DFLASH's chain. "
        "Default: as many as the budget, which is exact.",
    )
    parser.add_argument(
        "--speculative-ddtree-chain-seed",
        action="store_true",
        help="DDTREE only. Put the chain of the drafter's first choices, DFLASH's draft, into every tree first: with a "
        "budget of the block size - 1 or more, a greedy step then never accepts less than DFLASH's.",
    )
    parser.add_argument(
        "--speculative-ddtree-allow-hybrid-unsafe",
        action="store_true",
        help="DDTREE only. Serve a model with recurrent (Mamba, GDN) layers. They keep a state per tree node, which is "
        "proven kernel by kernel for GDN with Triton and for nothing else: the output may differ from the model's own.",
    )
    # No flag: `report_overlay` sets the field. `ServerArgs.from_cli_args` reads it here all the same.
    parser.set_defaults(speculative_ddtree_overlay_id=None)


def begin_arguments(server_args: ServerArgs) -> None:
    """What is done before SGLang completes any argument: report the overlay, and let DDTREE choose its backend first.

    SGLang's own defaults, a model's or a GPU's, only fill in what is open: those may be unable to verify a tree.
    """
    report_overlay(server_args)
    if str(reading(server_args).speculative_algorithm).upper() == DDTREE:
        choose_attention_backend(server_args)


def report_overlay(server_args: ServerArgs) -> None:
    """Let `/server_info` name the overlay that this process has loaded; nobody can set it to anything else."""
    from sglang.srt.speculative.ddtree.overlay_id import OVERLAY_ID

    settle(server_args, speculative_ddtree_overlay_id=OVERLAY_ID)


def choose_attention_backend(server_args: ServerArgs) -> None:
    """Choose a backend that can verify a tree when the user named none; DFLASH's default on Hopper cannot.

    It is the first handler to see the name, which `SpeculativeAlgorithm` takes in any case: from here on it is DDTREE.
    """
    settle(server_args, speculative_algorithm=DDTREE)
    found = reading(server_args)
    if not (found.attention_backend or found.prefill_attention_backend or found.decode_attention_backend):
        backend = TREE_ATTENTION_BACKENDS[0]
        settle(server_args, attention_backend=backend)
        logger.warning("DDTREE: no attention backend was given; using %s, which verifies trees.", backend)


def enter_dflash_handling(server_args: ServerArgs) -> None:
    """Let SGLang's DFLASH branch check and complete the arguments: DDTREE drafts exactly as DFLASH does.

    DFLASH requires the block size and `speculative_num_draft_tokens` to be one number. Arguments that were completed
    before (`dataclasses.replace` runs the handler again) hold a verify width there; what is drafted is the block size.

    Raises:
        ValueError: A DDTREE argument cannot be used.
    """
    found = reading(server_args)
    _check_own_fields(found)
    given = found.speculative_num_draft_tokens
    if given is not None and found.speculative_dflash_block_size is None:
        raise ValueError(
            f"DDTREE sets --speculative-num-draft-tokens itself, to the budget + 1; got {given}. "
            "Set the draft width with --speculative-dflash-block-size, the tree's with --speculative-ddtree-budget."
        )
    settle(server_args, speculative_num_draft_tokens=None, speculative_algorithm="DFLASH")


def finish_dflash_handling(server_args: ServerArgs) -> None:
    """Set both widths and refuse what a tree cannot serve.

    Raises:
        ValueError: The configuration cannot be served; the text names the flag, the reason and the way out.
    """
    settle(server_args, speculative_algorithm=DDTREE)
    block_size = int(reading(server_args).speculative_num_draft_tokens)
    if block_size < 2:
        raise ValueError(
            f"DDTREE needs a draft block of at least 2 tokens (the bonus token and one draft), got {block_size}. "
            "Set --speculative-dflash-block-size to the block size of the draft model."
        )
    settle(
        server_args,
        speculative_dflash_block_size=block_size,
        speculative_num_draft_tokens=verify_width(reading(server_args)),
    )
    check_backends(reading(server_args))
    _check_features(reading(server_args))
    _check_model(server_args)
    _check_capacity(server_args)


def verify_width(server_args: Any) -> int:
    """Tokens that the target verifies per request and step: the root and `budget` draft nodes.

    Args:
        server_args: The arguments, or whatever shows the speculative ones (`published.spec`).
    """
    return int(server_args.speculative_ddtree_budget) + 1


def largest_width(server_args: Any) -> int:
    """The most tokens that a step writes per request: the draft block or the tree, whichever is wider.

    Args:
        server_args: The arguments, or whatever shows the speculative ones (`published.spec`).
    """
    block_size = server_args.speculative_dflash_block_size
    return max(int(server_args.speculative_num_draft_tokens), 0 if block_size is None else int(block_size))


def draft_width() -> int:
    """Tokens that the draft runs per request and step: the block of this process's arguments."""
    return int(spec().speculative_dflash_block_size)


def draft_view(server_args: ServerArgs) -> ServerArgs:
    """A copy of `server_args` in which every width is the draft block: what the draft worker is built from."""
    view = copy.deepcopy(server_args)
    view.speculative_num_draft_tokens = server_args.speculative_dflash_block_size
    view.speculative_eagle_topk = 1
    vars(view).pop("max_speculative_num_draft_tokens", None)  # newer releases cache the largest width
    return view


def extra_draft_columns(server_args: ServerArgs) -> int:
    """Columns a `req_to_token` row needs beyond the verify width.

    The draft block is mapped into the same row as the tree. With a budget below the block size it is the wider of the
    two, and at the end of the context it would run into the next request's row.
    """
    if server_args.speculative_algorithm != DDTREE:
        return 0
    return max(0, int(server_args.speculative_dflash_block_size) - verify_width(server_args))


def request_meta_info(server_args: ServerArgs) -> dict[str, Any]:
    """What a response's `meta_info` says about the algorithm beside SGLang's own accept length."""
    return {
        "spec_algorithm": DDTREE,
        "spec_ddtree_budget": int(server_args.speculative_ddtree_budget),
    }


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


def _check_own_fields(server_args: Any) -> None:
    budget = server_args.speculative_ddtree_budget
    if not isinstance(budget, int) or budget < 1:
        raise ValueError(
            f"DDTREE requires --speculative-ddtree-budget to be at least 1, got {budget}. "
            "Without draft nodes there is nothing to verify: leave out --speculative-algorithm instead."
        )
    cap = server_args.speculative_ddtree_topk_cap
    if cap is not None and (not isinstance(cap, int) or cap < 1):
        raise ValueError(f"DDTREE requires --speculative-ddtree-topk-cap to be at least 1, got {cap}.")
    for field in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
        if getattr(server_args, field) != 1.0:
            raise ValueError(
                f"DDTREE is lossless, a relaxed acceptance is not: --{field.replace('_', '-')} must stay 1.0, "
                f"got {getattr(server_args, field)}."
            )


def _check_features(server_args: Any) -> None:
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


def _check_model(server_args: ServerArgs) -> None:
    if uses_mla(server_args):
        raise ValueError(
            "DDTREE does not support MLA models yet: their tree verify is not proven. "
            "Use --speculative-algorithm DFLASH."
        )
    config = model_config(server_args).hf_config
    if is_hybrid_config(config):
        check_hybrid(server_args, (config.architectures or ["this model"])[0], config)
        _check_tracked_states(server_args)
        # What SGLang's recurrent layers ask before they read a verify input as a tree.
        settle(server_args, speculative_eagle_topk=2)


def _check_tracked_states(server_args: ServerArgs) -> None:
    """Refuse ways of keeping recurrent states for the prefix cache that lose some of a tree step's, flag or no flag."""
    if recurrent_strategy(server_args) == "extra_buffer_lazy":
        raise ValueError("DDTREE does not support the lazy extra buffer for recurrent states. Use no_buffer.")
    interval, width = int(reading(server_args).mamba_track_interval), verify_width(reading(server_args))
    if interval < width:
        raise ValueError(
            f"DDTREE: a step of {width} tokens crosses more than one tracked recurrent state (every {interval}). "
            f"Set --speculative-ddtree-budget to {interval - 1} or less."
        )


def _check_capacity(server_args: ServerArgs) -> None:
    """Budgets that no configuration of the pools could hold; `gates` checks against the real pools and free memory."""
    width = verify_width(reading(server_args))
    limits = (
        ("--max-total-tokens", reading(server_args).max_total_tokens),
        ("the context length", model_config(server_args).context_len),
    )
    for name, limit in limits:
        if limit is not None and width > int(limit):
            raise ValueError(
                f"DDTREE --speculative-ddtree-budget {width - 1} needs {width} tokens per request and step, more than "
                f"{name} ({limit}) holds. Set it to {int(limit) - 1} or less."
            )
