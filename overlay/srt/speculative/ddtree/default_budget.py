# SPDX-License-Identifier: Apache-2.0
"""The budget of an engine that was given none: `auto` where it can be served, else one fixed number.

What `auto` needs beside a fixed budget is several lanes; no default one is wider than the fixed budget. The check that
refuses them asks the same function: what is chosen when nothing is said is never refused for that when it is.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt.speculative.ddtree.backends import backends_of
from sglang.srt.speculative.ddtree.budgets import AUTO, DEFAULT_BUDGET, is_auto
from sglang.srt.speculative.ddtree.hybrid import is_hybrid_config
from sglang.srt.speculative.ddtree.model_facts import model_config
from sglang.srt.speculative.ddtree.settings import reading, settle


if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

#: Attention backends with which several verify widths were run in one engine.
LANE_BACKENDS = ("triton",)


@dataclass(frozen=True, slots=True)
class Obstacle:
    """What stands in the way of several lanes.

    Args:
        reason: A clause.
        remedy: What takes it away; None where nothing does.
    """

    reason: str
    remedy: str | None


#: Of a model with recurrent layers; `gates` finds them in the model, where its config does not tell.
RECURRENT = Obstacle(
    "one budget only is verified for models with recurrent layers: their states are kept for one verify width", None
)


def settle_budget(server_args: ServerArgs) -> None:
    """Settle the budget when none was given; the block size has to be known, and backends that verify trees chosen.

    Whoever lists budgets has asked for lanes, and gets `auto` among them: no fixed budget would be served where that is
    refused.
    """
    found = reading(server_args)
    if found.speculative_ddtree_budget is not None:
        return
    obstacle = why_one_lane(server_args) if found.speculative_ddtree_budgets is None else None
    if obstacle is None:
        settle(server_args, speculative_ddtree_budget=AUTO)
        return
    settle(server_args, speculative_ddtree_budget=DEFAULT_BUDGET)
    logger.warning(
        "DDTREE: no --speculative-ddtree-budget was given; using %d instead of %s: %s. To choose the number give "
        "--speculative-ddtree-budget N; %s.",
        DEFAULT_BUDGET,
        AUTO,
        obstacle.reason,
        f"for --speculative-ddtree-budget {AUTO} use {obstacle.remedy}" if obstacle.remedy else f"{AUTO} is refused",
    )


def why_one_lane(server_args: ServerArgs) -> Obstacle | None:
    """Why an engine cannot verify several budgets; None where it can."""
    if is_hybrid_config(model_config(server_args).hf_config):
        return RECURRENT
    unproven = [backend for backend in backends_of(reading(server_args)) if backend not in LANE_BACKENDS]
    if not unproven:
        return None
    return Obstacle(
        f"one budget only is verified with the attention backend {unproven[0]}: switching between verify widths is "
        f"proven with {', '.join(LANE_BACKENDS)}",
        f"--attention-backend {LANE_BACKENDS[0]}",
    )


def narrower(server_args: Any, most: int) -> str:
    """The beginning of the ways out where budgets are too large: what to set to which number.

    Args:
        server_args: The arguments, or whatever shows the speculative ones (`published.spec`).
        most: The largest budget that fits in the place of the widest.
    """
    if not is_auto(server_args):
        return f"Lower --speculative-ddtree-budget (at most {most} fits)"
    fixed = fixed_instead(server_args, most)
    return f"Name narrower --speculative-ddtree-budgets (at most {most} fits)" + (fixed and f", use {fixed}")


def fixed_instead(server_args: Any, most: int) -> str:
    """The flag of the fixed budget that is served where `auto` is not; empty where there is none, or no `auto`.

    Args:
        server_args: The arguments, or whatever shows the speculative ones (`published.spec`).
        most: The largest fixed budget that is.
    """
    if not is_auto(server_args) or most < 1:
        return ""
    return f"--speculative-ddtree-budget {min(DEFAULT_BUDGET, most)} alone"
