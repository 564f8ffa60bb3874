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
from typing import TYPE_CHECKING, Any

from sglang.srt.speculative.ddtree.backends import TREE_ATTENTION_BACKENDS, check_backends


if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

DDTREE = "DDTREE"

#: Features whose interplay with a tree is not proven: the field, the value that leaves it off, its flag.
_UNPROVEN_FEATURES = (
    ("disaggregation_mode", "null", "--disaggregation-mode"),
    ("enable_two_batch_overlap", False, "--enable-two-batch-overlap"),
    ("enable_pdmux", False, "--enable-pdmux"),
    ("enable_lora", False, "--enable-lora"),
    # Host copies hold the target's KV only: a reloaded prefix would be drafted from garbage.
    ("enable_hierarchical_cache", False, "--enable-hierarchical-cache"),
    ("enable_lmcache", False, "--enable-lmcache"),
    ("attn_cp_size", 1, "--attention-context-parallel-size"),
    ("rl_on_policy_target", None, "--rl-on-policy-target"),
)


def add_ddtree_cli_args(parser: argparse.ArgumentParser) -> None:
    """Add the DDTREE flags and admit DDTREE as a speculative algorithm.

    Args:
        parser: A parser that already has `--speculative-algorithm`.
    """
    from sglang.srt.server_args import ServerArgs

    for action in parser._actions:
        if action.dest == "speculative_algorithm" and action.choices is not None:
            action.choices = [*action.choices, DDTREE]
    parser.add_argument(
        "--speculative-ddtree-budget",
        type=int,
        default=ServerArgs.speculative_ddtree_budget,
        help="DDTREE only. Draft nodes per tree, root not counted; the target verifies budget + 1 tokens a step.",
    )
    parser.add_argument(
        "--speculative-ddtree-topk-cap",
        type=int,
        default=ServerArgs.speculative_ddtree_topk_cap,
        help="DDTREE only. Most tokens considered per draft position; 1 drafts DFLASH's chain. "
        "Default: as many as the budget, which is exact.",
    )
    parser.add_argument(
        "--speculative-ddtree-chain-seed",
        action="store_true",
        default=ServerArgs.speculative_ddtree_chain_seed,
        help="DDTREE only. Put the chain of the drafter's first choices, DFLASH's draft, into every tree first: with a "
        "budget of the block size - 1 or more, a greedy step then never accepts less than DFLASH's.",
    )
    parser.add_argument(
        "--speculative-ddtree-allow-hybrid-unsafe",
        action="store_true",
        default=ServerArgs.speculative_ddtree_allow_hybrid_unsafe,
        help="DDTREE only. Serve a model with recurrent (Mamba, GDN) layers. They keep a state per tree node, which is "
        "proven kernel by kernel for GDN with Triton and for nothing else: the output may differ from the model's own.",
    )
    # No flag: `report_overlay` sets the field. `ServerArgs.from_cli_args` reads it here all the same.
    parser.set_defaults(speculative_ddtree_overlay_id=None)


def report_overlay(server_args: ServerArgs) -> None:
    """Let `/server_info` name the overlay that this process has loaded; nobody can set it to anything else."""
    from sglang.srt.speculative.ddtree.overlay_id import OVERLAY_ID

    server_args.speculative_ddtree_overlay_id = OVERLAY_ID


def choose_attention_backend(server_args: ServerArgs) -> None:
    """Choose a backend that can verify a tree when the user named none; DFLASH's default on Hopper cannot.

    It is the first handler to see the name, which `SpeculativeAlgorithm` takes in any case: from here on it is DDTREE.
    """
    server_args.speculative_algorithm = DDTREE
    if server_args.is_attention_backend_not_set():
        server_args.attention_backend = TREE_ATTENTION_BACKENDS[0]
        logger.warning(
            "DDTREE: no attention backend was given; using %s, which verifies trees.",
            server_args.attention_backend,
        )


def enter_dflash_handling(server_args: ServerArgs) -> None:
    """Let SGLang's DFLASH branch check and complete the arguments: DDTREE drafts exactly as DFLASH does.

    DFLASH requires the block size and `speculative_num_draft_tokens` to be one number. Arguments that were completed
    before (`dataclasses.replace` runs the handler again) hold a verify width there; what is drafted is the block size.

    Raises:
        ValueError: A DDTREE argument cannot be used.
    """
    _check_own_fields(server_args)
    given = server_args.speculative_num_draft_tokens
    if given is not None and server_args.speculative_dflash_block_size is None:
        raise ValueError(
            f"DDTREE sets --speculative-num-draft-tokens itself, to the budget + 1; got {given}. "
            "Set the draft width with --speculative-dflash-block-size, the tree's with --speculative-ddtree-budget."
        )
    server_args.speculative_num_draft_tokens = None
    server_args.speculative_algorithm = "DFLASH"


def finish_dflash_handling(server_args: ServerArgs) -> None:
    """Set both widths and refuse what a tree cannot serve.

    Raises:
        ValueError: The configuration cannot be served; the text names the flag, the reason and the way out.
    """
    server_args.speculative_algorithm = DDTREE
    block_size = int(server_args.speculative_num_draft_tokens)
    if block_size < 2:
        raise ValueError(
            f"DDTREE needs a draft block of at least 2 tokens (the bonus token and one draft), got {block_size}. "
            "Set --speculative-dflash-block-size to the block size of the draft model."
        )
    server_args.speculative_dflash_block_size = block_size
    server_args.speculative_num_draft_tokens = verify_width(server_args)
    check_backends(server_args)
    _check_features(server_args)
    _check_model(server_args)
    _check_capacity(server_args)


def verify_width(server_args: ServerArgs) -> int:
    """Tokens that the target verifies per request and step: the root and `budget` draft nodes."""
    return int(server_args.speculative_ddtree_budget) + 1


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
    base = server_args.linear_attn_backend
    kernels = {server_args.linear_attn_decode_backend or base, server_args.linear_attn_prefill_backend or base}
    if kernels != {"triton"}:
        return f"of the linear attention backend {' and '.join(sorted(kernels))} only triton's kernels read a tree"
    if server_args.mamba_scheduler_strategy not in ("auto", "no_buffer"):
        return (
            f"--mamba-scheduler-strategy {server_args.mamba_scheduler_strategy} keeps states that a tree step crosses"
        )
    settings = {
        "an attention backend other than triton": set(server_args.get_attention_backends()) != {"triton"},
        f"--page-size {server_args.page_size}": int(server_args.page_size or 1) > 1,
        "a prefix cache (no --disable-radix-cache)": not server_args.disable_radix_cache,
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
    if not server_args.speculative_ddtree_allow_hybrid_unsafe:
        raise ValueError(
            f"DDTREE is not proven to serve {model_name} losslessly: {risk}. Use --speculative-algorithm DFLASH, or "
            "accept that the output may differ with --speculative-ddtree-allow-hybrid-unsafe."
        )
    logger.warning("DDTREE: the output of %s may differ from its own (unsafe flag set): %s.", model_name, risk)


def _check_own_fields(server_args: ServerArgs) -> None:
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


def _check_features(server_args: ServerArgs) -> None:
    for field, off, flag in _UNPROVEN_FEATURES:
        if getattr(server_args, field, off) not in (off, None):
            raise ValueError(
                f"DDTREE does not support {flag} yet. Leave it out, or use --speculative-algorithm DFLASH."
            )


def _check_model(server_args: ServerArgs) -> None:
    if server_args.use_mla_backend():
        raise ValueError(
            "DDTREE does not support MLA models yet: their tree verify is not proven. "
            "Use --speculative-algorithm DFLASH."
        )
    model_config = server_args.get_model_config()
    if is_hybrid_config(model_config.hf_config):
        name = (model_config.hf_config.architectures or ["this model"])[0]
        check_hybrid(server_args, name, model_config.hf_config)
        # What SGLang's recurrent layers ask before they read a verify input as a tree.
        server_args.speculative_eagle_topk = 2


def _check_capacity(server_args: ServerArgs) -> None:
    """Budgets that no configuration of the pools could hold; `gates` checks against the real pools and free memory."""
    width = verify_width(server_args)
    limits = (
        ("--max-total-tokens", server_args.max_total_tokens),
        ("the context length", server_args.get_model_config().context_len),
    )
    for name, limit in limits:
        if limit is not None and width > int(limit):
            raise ValueError(
                f"DDTREE --speculative-ddtree-budget {width - 1} needs {width} tokens per request and step, more than "
                f"{name} ({limit}) holds. Set it to {int(limit) - 1} or less."
            )
