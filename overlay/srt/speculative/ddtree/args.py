# SPDX-License-Identifier: Apache-2.0
"""Server arguments of DDTREE: completion, validation, and the widths that the rest of SGLang reads.

DFLASH has one width, DDTREE two. The draft model still drafts a block of `speculative_dflash_block_size` tokens
(bonus token included); the target verifies at most the largest budget + 1 nodes (root included). Every pool, graph and
attention backend reads its width from `speculative_num_draft_tokens`, so that field holds the largest verify width on
the target and the block size on the draft worker's own copy of the arguments. `lanes` builds the narrower widths.
"""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any

from sglang.srt.speculative.ddtree.backends import TREE_ATTENTION_BACKENDS, check_backends
from sglang.srt.speculative.ddtree.budgets import budget_list, budgets, parsed_budget
from sglang.srt.speculative.ddtree.calibration_args import check_calibration
from sglang.srt.speculative.ddtree.default_budget import fixed_instead, settle_budget, why_one_lane
from sglang.srt.speculative.ddtree.features import check_features, warn_of_released_weights
from sglang.srt.speculative.ddtree.given import checked_calibration, checked_cap, checked_switch
from sglang.srt.speculative.ddtree.hybrid import check_hybrid, check_tracked_states, is_hybrid_config
from sglang.srt.speculative.ddtree.model_facts import model_config, uses_mla
from sglang.srt.speculative.ddtree.published import spec
from sglang.srt.speculative.ddtree.settings import reading, settle


if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

DDTREE = "DDTREE"


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
    _settle_own_fields(server_args)
    found = reading(server_args)
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
    check_calibration(reading(server_args).speculative_ddtree_calibration, block_size)
    settle(server_args, speculative_dflash_block_size=block_size)
    check_backends(reading(server_args))
    check_features(reading(server_args))
    warn_of_released_weights(reading(server_args))
    _check_model(server_args)
    settle_budget(server_args)
    settle(server_args, speculative_num_draft_tokens=verify_width(reading(server_args)))
    if len(budgets(reading(server_args))) > 1:  # what `/server_info` answers
        settle(server_args, speculative_ddtree_budgets=list(budgets(reading(server_args))))
    _check_lanes(server_args)
    _check_states(server_args)
    _check_capacity(server_args)


def verify_width(server_args: Any) -> int:
    """The most tokens that the target verifies per request and step: the root and the largest budget's draft nodes.

    Args:
        server_args: The arguments, or whatever shows the speculative ones (`published.spec`).
    """
    return budgets(server_args)[-1] + 1


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
    """What a response's `meta_info` says about the algorithm beside SGLang's own accept length.

    SGLang's accept rate counts as many drafts a step as the widest lane has. Where steps are of several widths nobody
    here knows how many a request was offered, and no rate is better than a wrong one.
    """
    known = budgets(server_args)
    return {
        "spec_algorithm": DDTREE,
        "spec_ddtree_budget": server_args.speculative_ddtree_budget,
        "spec_ddtree_budgets": list(known),
        **({"spec_accept_rate": None} if len(known) > 1 else {}),
    }


def _settle_own_fields(server_args: ServerArgs) -> None:
    """Check what is given, and set it as the rest reads it: a number may have been text."""
    found = reading(server_args)
    if found.speculative_ddtree_budgets is not None:
        budget_list(found.speculative_ddtree_budgets)
    given = found.speculative_ddtree_budget
    switches = ("speculative_ddtree_chain_seed", "speculative_ddtree_allow_hybrid_unsafe")
    settle(
        server_args,
        # None until the block size and the model are known: `settle_budget`.
        speculative_ddtree_budget=None if given is None else parsed_budget(given),
        speculative_ddtree_topk_cap=checked_cap(found.speculative_ddtree_topk_cap),
        speculative_ddtree_calibration=checked_calibration(found.speculative_ddtree_calibration),
        **{field: checked_switch(field, getattr(found, field)) for field in switches},
    )
    for field in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
        if getattr(found, field) != 1.0:
            raise ValueError(
                f"DDTREE is lossless, a relaxed acceptance is not: --{field.replace('_', '-')} must stay 1.0, "
                f"got {getattr(found, field)}."
            )


def _check_lanes(server_args: ServerArgs) -> None:
    """Refuse several lanes where only one is proven."""
    obstacle = why_one_lane(server_args) if len(budgets(reading(server_args))) > 1 else None
    if obstacle is not None:
        remedy = f"{obstacle.remedy}, or " if obstacle.remedy else ""
        raise ValueError(
            f"DDTREE: {obstacle.reason}. Use {remedy}--speculative-ddtree-budget N without "
            "--speculative-ddtree-budgets."
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


def _check_states(server_args: ServerArgs) -> None:
    """Refuse steps that cross tracked recurrent states, and let recurrent layers read a verify input as a tree."""
    if is_hybrid_config(model_config(server_args).hf_config):
        check_tracked_states(server_args, verify_width(reading(server_args)))
        # What SGLang's recurrent layers ask before they do.
        settle(server_args, speculative_eagle_topk=2)


def _check_capacity(server_args: ServerArgs) -> None:
    """Budgets that no configuration of the pools could hold; `gates` checks against the real pools and free memory."""
    found = reading(server_args)
    width = verify_width(found)
    flag = "--speculative-ddtree-budgets" if len(budgets(found)) > 1 else "--speculative-ddtree-budget"
    limits = (
        ("--max-total-tokens", found.max_total_tokens),
        ("the context length", model_config(server_args).context_len),
    )
    for name, limit in limits:
        if limit is not None and width > int(limit):
            most = int(limit) - 1
            fixed = fixed_instead(found, most)
            raise ValueError(
                f"DDTREE: a budget of {width - 1} needs {width} tokens per request and step, more than {name} "
                f"({limit}) holds. Set {flag} to {most} or less{fixed and f', or use {fixed}'}."
            )
