# SPDX-License-Identifier: Apache-2.0
"""The accept walk: follow the target's own tokens down the tree, and say what a step has emitted and keeps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.speculative.ddtree.tree import Tree


@dataclass(frozen=True)
class Acceptance:
    """What one verify step accepts of each tree; P = max depth + 1, S = block size.

    A step that accepts n draft tokens commits n + 1 nodes, the root and the accepted ones, and emits n + 1 tokens, the
    accepted ones and the bonus token.
    """

    #: `tokens`, `path` and `accept_lens` in one piece, which is one copy to the host: int64 [bs * (S + P + 1)], the
    #: three one behind the other, each as below. They are views of it.
    report: torch.Tensor
    #: Node indices from the root down, -1 behind the end, int64 [bs, P].
    path: torch.Tensor
    #: Accepted draft tokens, root not counted, int64 [bs].
    accept_lens: torch.Tensor
    #: The target's token after the last accepted node, int64 [bs].
    bonus: torch.Tensor
    #: Committed nodes and emitted tokens, int32 [bs].
    commit_lens: torch.Tensor
    #: Committed tokens of each request after the step, int64 [bs].
    new_seq_lens: torch.Tensor
    #: Emitted tokens: the accepted drafts, the bonus token, 0 behind them, int64 [bs, S].
    tokens: torch.Tensor
    #: Row of each committed node among all nodes of the batch, the request's root behind the end, int64 [bs, S].
    rows: torch.Tensor
    #: The last committed node, int64 [bs].
    last_nodes: torch.Tensor


def accept(
    tree: Tree,
    target_tokens: torch.Tensor,
    *,
    prefix_lens: torch.Tensor,
    block_size: int,
    root_only: torch.Tensor | None = None,
) -> Acceptance:
    """Accept each node whose token, and whose ancestors' tokens, are what the target chose at their parents.

    With one genuine target token per node (argmax, or one sample) every emitted token is the target's own, so the
    output has the target's distribution whatever the tree holds. Siblings hold distinct tokens, so the accepted nodes
    are one path. On a GPU this is one launch.

    Args:
        target_tokens: The target's token after each node, int64 [bs, W].
        prefix_lens: Committed tokens of each request before the step, integers [bs].
        block_size: S, above the tree's largest depth.
        root_only: Requests of which only the root's token may be emitted, bool [bs].
    """
    if target_tokens.is_cuda:
        from sglang.srt.speculative.ddtree.accept_kernel import accept_by_walk as walk
    else:
        walk = accept_by_closure
    return walk(tree, target_tokens, prefix_lens=prefix_lens, block_size=block_size, root_only=root_only)


def accept_by_closure(
    tree: Tree,
    target_tokens: torch.Tensor,
    *,
    prefix_lens: torch.Tensor,
    block_size: int,
    root_only: torch.Tensor | None = None,
) -> Acceptance:
    """The acceptance by tensor operations, the reference; arguments as in `accept`."""
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
    bonus = target_tokens.gather(1, last)

    padded = torch.nn.functional.pad(path, (0, block_size - path.shape[1]), value=-1)
    drafts = tree.tokens.gather(1, padded.clamp(min=0)).masked_fill(padded < 0, 0)
    tokens = torch.nn.functional.pad(drafts[:, 1:], (0, 1)).scatter(1, accept_lens.unsqueeze(1), bonus)
    first_rows = torch.arange(batch, device=path.device).unsqueeze(1) * width
    report = torch.cat([tokens.flatten(), path.flatten(), accept_lens])
    tokens, path, accept_lens = views_of(report, batch, block_size)
    return Acceptance(
        report=report,
        path=path,
        accept_lens=accept_lens,
        bonus=bonus.squeeze(1),
        commit_lens=(accept_lens + 1).to(torch.int32),
        new_seq_lens=prefix_lens.to(torch.int64) + accept_lens + 1,
        tokens=tokens,
        rows=first_rows + padded.clamp(min=0),
        last_nodes=last.squeeze(1),
    )


def views_of(report: torch.Tensor, batch: int, block_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, path and accept lengths of an `Acceptance.report`, on whichever device it is."""
    tokens, rest = batch * block_size, report.numel() - batch
    return report[:tokens].view(batch, block_size), report[tokens:rest].view(batch, -1), report[rest:]


def emitted_of(report: list[int], batch: int, block_size: int) -> tuple[list[list[int]], list[int]]:
    """Tokens and accept lengths as lists, from the report as a list."""
    tokens = [report[start : start + block_size] for start in range(0, batch * block_size, block_size)]
    return tokens, report[len(report) - batch :]


def paths_of(report: list[int], batch: int, block_size: int) -> list[list[int]]:
    """Paths as lists, from the report as a list."""
    first, last = batch * block_size, len(report) - batch
    steps = (last - first) // batch
    return [report[start : start + steps] for start in range(first, last, steps)]
