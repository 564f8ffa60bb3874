# SPDX-License-Identifier: Apache-2.0
"""What the kernels of a round are compared and timed with. Import it where the overlay can be imported."""

from __future__ import annotations

from typing import Any

import torch


BLOCK = 16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def choices(batch: int, k: int, seed: int, horizon: int = BLOCK - 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and ids as a drafter gives them: confident at first, flatter with depth."""
    generator = torch.Generator().manual_seed(seed)
    sharpness = torch.linspace(4.0, 1.5, horizon).view(1, horizon, 1)
    logits = torch.randn((batch, horizon, max(2 * k, 64)), generator=generator) * sharpness
    log_probs, ids = torch.log_softmax(logits, dim=-1).sort(dim=-1, descending=True)
    return log_probs[..., :k].contiguous().to(DEVICE), ids[..., :k].contiguous().to(DEVICE)


def likely_targets(tree: Any, seed: int) -> torch.Tensor:
    """Target tokens that follow the tree for some steps: at each node one of its children, or a token of no child."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.full(tree.tokens.shape, -1, dtype=torch.int64)
    tokens, parents = tree.tokens.cpu(), tree.parents.cpu()
    for request in range(tokens.shape[0]):
        for node in range(tokens.shape[1] - 1, 0, -1):
            if parents[request, node] >= 0 and torch.rand(1, generator=generator) < 0.8:
                targets[request, parents[request, node]] = tokens[request, node]
    return targets.to(DEVICE)


def labels(batch: int, k: int, seed: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """What a step tells the fit of the exponents: choices, emitted tokens, accept lengths."""
    from sglang.srt.speculative.ddtree.draft_head import Choices

    log_probs, ids = choices(batch, max(k, 64), seed)
    logits = log_probs.flatten(0, 1) + 3.0
    scaled = torch.log_softmax(1.3 * logits, dim=-1)
    mean = (scaled.exp() * logits).sum(dim=-1)
    kept = [part[:, :k].contiguous() for part in (scaled, ids.flatten(0, 1), logits)]
    generator = torch.Generator().manual_seed(seed)
    ranks = torch.randint(0, k, (batch, BLOCK - 1, 1), generator=generator).to(DEVICE)
    tokens = torch.nn.functional.pad(kept[1].view(batch, BLOCK - 1, k).gather(2, ranks).squeeze(2), (0, 1))
    accept_lens = torch.randint(0, BLOCK, (batch,), generator=generator).to(DEVICE)
    return Choices(*kept, mean, torch.logsumexp(logits, dim=-1)), tokens, accept_lens


class Ranks:
    """Tensor-parallel ranks one after the other: a first pass records what each gathers, a second answers."""

    def __init__(self, size: int) -> None:
        self.world_size = size
        self.parts: list[torch.Tensor] = []

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """What all ranks gathered."""
        self.parts.append(tensor)
        parts = self.parts[: self.world_size] if len(self.parts) > self.world_size else [tensor] * self.world_size
        return torch.cat(parts, dim=dim)


def shards_of(
    rows: int, org: int, added: int, dtype: torch.dtype, *, ranks: int, seed: int
) -> list[tuple[torch.Tensor, Any]]:
    """Every rank's logits, padded with columns that would win if they were read, and which of them are tokens."""
    from sglang.srt.speculative.ddtree.draft_head import Columns

    torch.manual_seed(seed)
    org_size, added_size = (-(-max(size, 1) // (64 * ranks)) * 64 for size in (org, added))
    logits = torch.randn(rows, org + added, device=DEVICE) * 4
    if seed % 2:
        logits = logits.round()
    if rows > 2:
        logits[1, org // 2] = float("nan")
        logits[2, 3:] = float("-inf")
    shards = []
    for rank in range(ranks):
        parts = (
            (logits[:, :org][:, rank * org_size : (rank + 1) * org_size], org_size),
            (logits[:, org:][:, rank * added_size : (rank + 1) * added_size], added_size),
        )
        padded = [torch.nn.functional.pad(part, (0, size - part.shape[1]), value=99.0) for part, size in parts]
        columns = Columns(
            org=parts[0][0].shape[1],
            first_org_id=rank * org_size,
            added_start=org_size,
            added=parts[1][0].shape[1],
            first_added_id=org + rank * added_size,
        )
        shards.append((torch.cat(padded, dim=1).to(dtype), columns))
    return shards
