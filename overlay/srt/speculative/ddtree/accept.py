# SPDX-License-Identifier: Apache-2.0
"""The accept walk: follow the target's own tokens down the tree."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.speculative.ddtree.tree import Tree


@dataclass(frozen=True)
class Acceptance:
    """What one verify step accepts of each tree; P = max depth + 1."""

    #: Node indices from the root down, -1 behind the end, int64 [bs, P].
    path: torch.Tensor
    #: Accepted draft tokens, root not counted, int64 [bs].
    accept_lens: torch.Tensor
    #: The target's token after the last accepted node, int64 [bs].
    bonus: torch.Tensor


def accept_paths(tree: Tree, target_tokens: torch.Tensor, root_only: torch.Tensor | None = None) -> Acceptance:
    """Accept each node whose token, and whose ancestors' tokens, are what the target chose at their parents.

    With one genuine target token per node (argmax, or one sample) every emitted token is the target's own, so the
    output has the target's distribution whatever the tree holds. Siblings hold distinct tokens, so the accepted nodes
    are one path.

    Args:
        target_tokens: The target's token after each node, int64 [bs, W].
        root_only: Requests of which only the root's token may be emitted, bool [bs].
    """
    batch, width = target_tokens.shape
    has_parent = tree.parents >= 0
    wanted = target_tokens.gather(1, tree.parents.clamp(min=0))
    matches = has_parent & (tree.tokens == wanted)
    if root_only is not None:
        matches &= ~root_only.unsqueeze(1)
    matches[:, 0] = True
    accepted = (matches.unsqueeze(1) | ~tree.ancestors).all(dim=2)

    nodes = torch.arange(width, device=target_tokens.device).expand(batch, width)
    columns = torch.where(accepted, tree.depths, tree.max_depth + 1)  # rejected nodes go to a column that is cut off
    path = torch.full((batch, tree.max_depth + 2), -1, dtype=torch.int64, device=target_tokens.device)
    path = path.scatter(1, columns, nodes)[:, : tree.max_depth + 1]

    accept_lens = accepted.sum(dim=1) - 1
    last = path.gather(1, accept_lens.unsqueeze(1))
    return Acceptance(path=path, accept_lens=accept_lens, bonus=target_tokens.gather(1, last).squeeze(1))
