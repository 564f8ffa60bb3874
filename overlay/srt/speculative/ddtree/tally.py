# SPDX-License-Identifier: Apache-2.0
"""What a verified step tells of every width, counted on the device: one launch, nothing waits for it.

A row a request: the draft tokens that each width's tree would have accepted, the sum of its nodes' probabilities, and
the draft tokens that the chain would have accepted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch


if TYPE_CHECKING:
    from sglang.srt.speculative.ddtree.accept import Acceptance
    from sglang.srt.speculative.ddtree.tree import Tree


def columns(widths: int) -> int:
    """Columns of a row for so many widths."""
    return 2 * widths + 1


def tally_step(
    out: torch.Tensor,
    widths: torch.Tensor,
    tree: Tree,
    acceptance: Acceptance,
    choices: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Count a step.

    Widths above the tree's are told the same as the widest one; those above what was grown get the sum of what was.

    Args:
        out: Written: float32 [rows, columns]; the first `min(rows, bs)` rows, for the first requests.
        widths: Widths to count for, int32 [n], ascending.
        tree: The verified tree.
        acceptance: Its acceptance.
        choices: What the tree was built from: log-probabilities float32 and token ids int64, [bs, L, K] each.
    """
    if out.is_cuda:
        from sglang.srt.speculative.ddtree.tally_kernel import tally_by_kernel as count
    else:
        count = tally_by_tensors
    count(out, widths, tree, acceptance, choices)


def tally_by_tensors(
    out: torch.Tensor,
    widths: torch.Tensor,
    tree: Tree,
    acceptance: Acceptance,
    choices: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """The counts by tensor operations, the reference; arguments as in `tally_step`."""
    (log_probs, token_ids), count, rows = choices, len(widths), min(len(out), len(tree.tokens))
    path, accept_lens = acceptance.path[:rows], acceptance.accept_lens[:rows]
    grown = tree.grown_scores[:rows].exp()
    nodes = torch.arange(grown.shape[1], device=out.device)
    for ring, width in enumerate(widths.tolist()):
        out[:rows, ring] = ((path >= 1) & (path < width)).sum(dim=1)
        out[:rows, count + ring] = grown[:, (nodes >= 1) & (nodes < width)].sum(dim=1)

    ranks = tree.ranks[:rows].gather(1, path.clamp(min=0))
    first_choices = ((ranks == 0) & (path >= 0)).long().cumprod(dim=1)
    seen = first_choices.sum(dim=1) - 1
    # Where the walk ended on the chain though the target wanted its next token, the tree did not hold that node: the
    # chain gets it, and what the drafter expects of the rest.
    children = tree.parents[:rows] == acceptance.last_nodes[:rows].unsqueeze(1)
    held = (children & (tree.ranks[:rows] == 0)).any(dim=1)
    positions = log_probs.shape[1]
    last = accept_lens.clamp(max=positions - 1)
    next_choice = token_ids[:rows, :, 0].gather(1, last.unsqueeze(1)).squeeze(1)
    cut = (seen == accept_lens) & (accept_lens < positions) & ~held & (next_choice == acceptance.bonus[:rows])
    behind = torch.arange(positions, device=out.device) > accept_lens.unsqueeze(1)
    rest = (log_probs[:rows, :, 0].masked_fill(~behind, 0.0).cumsum(dim=1).exp() * behind).sum(dim=1)
    out[:rows, 2 * count] = seen + torch.where(cut, 1.0 + rest, 0.0)
