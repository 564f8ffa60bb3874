# SPDX-License-Identifier: Apache-2.0
"""The command line flags of DDTREE."""

from __future__ import annotations

import argparse

from sglang.srt.speculative.ddtree.args import DDTREE
from sglang.srt.speculative.ddtree.budgets import AUTO, DEFAULT_BUDGET, parsed_budget


#: The field of `ServerArgs` has the same default.
CALIBRATION = "auto"


def _budget(text: str) -> int | str:
    """`parsed_budget` for argparse, which shows the text of this error only."""
    try:
        return parsed_budget(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


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
        type=_budget,
        metavar=f"N|{AUTO}",
        help="DDTREE only. Draft nodes per tree, root not counted; the target verifies budget + 1 tokens a step. "
        f"{AUTO}: the engine measures what each budget gives and chooses one for each number of running requests. "
        f"Default: {AUTO}; {DEFAULT_BUDGET}, and a line of the log, where {AUTO} cannot be served (another attention "
        "backend than triton, recurrent layers).",
    )
    parser.add_argument(
        "--speculative-ddtree-budgets",
        metavar="LIST",
        help=f"DDTREE only. Budgets that graphs are captured for, like 4,8,15,32,64. {AUTO} chooses among them, and "
        'a request may ask for one of them in custom_params ("ddtree_budget"). A number given with '
        f"--speculative-ddtree-budget is always one of them; without one {AUTO} chooses.",
    )
    parser.add_argument(
        "--speculative-ddtree-calibration",
        default=CALIBRATION,
        metavar="auto|off|VALUES",
        help="DDTREE only. Exponents of the drafter's probabilities, one a depth, for scoring a tree: auto fits "
        "them to what the target accepts, off takes the probabilities as they are, VALUES (like 1.3 or 1.2,1.3,1.4) "
        f"sets them. What the target may emit never depends on it. Default: {CALIBRATION}.",
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
