# SPDX-License-Identifier: Apache-2.0
"""The drafter's best tokens by tensor operations: what `head_kernel` has to give."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.speculative.ddtree.draft_head import Choices, Columns
from sglang.srt.speculative.ddtree.tree import ordered_topk


def choose(
    logits: torch.Tensor,
    k: int,
    columns: Columns,
    *,
    scale: float | None,
    cap: float | None,
    exponents: torch.Tensor | None,
    moments: bool = True,
    group: Any,
) -> Choices:
    """The k best tokens of each row.

    Args:
        logits: As they come from the matrix product, float32, float16, bfloat16 or (for tests) float64 [rows, columns].
        k: At least 1. Where there are fewer tokens, the rest has log-probability -inf and token 0.
        columns: Which columns are tokens.
        scale: What the target multiplies its logits with, or None.
        cap: Its soft cap on them, or None.
        exponents: By draft position, float32 [L], or None; row r is about position r % L.
        moments: Whether exponents come with what their fit needs.
        group: The tensor-parallel group: `world_size` and `all_gather(tensor, dim)`.
    """
    if exponents is not None:
        exponents = exponents.repeat(-(-len(logits) // len(exponents)))[: len(logits)].unsqueeze(1)
    with_moments = moments and exponents is not None
    packed = _local_best(logits, k, columns, exponents, with_moments=with_moments, scale=scale, cap=cap)
    if group.world_size > 1:
        packed = group.all_gather(packed, dim=-1)
    return _merge(packed, k, scale, cap, exponents, with_moments=with_moments)


def _local_best(
    logits: torch.Tensor,
    k: int,
    columns: Columns,
    exponents: torch.Tensor | None,
    *,
    with_moments: bool,
    scale: float | None,
    cap: float | None,
) -> torch.Tensor:
    """What the other ranks have to know of this one's logits, in one tensor.

    Returns:
        int32 [rows, 2 * k + sums]: the bits of k raw logits, their token ids (-1 where there are fewer), and the bits
        of the partition sum's logarithm; with moments also those of the mean, and of the logarithm at exponent 1.
    """
    places, ids = _tokens(columns, logits.device)
    raw = logits[:, places]
    finished = _finish(raw if raw.dtype == torch.float64 else raw.float(), scale, cap)
    scaled = finished if exponents is None else exponents * finished
    log_z = torch.logsumexp(scaled, dim=-1, keepdim=True)
    sums = [log_z]
    if with_moments:
        weights = torch.exp(scaled - log_z)
        mean = torch.where(weights == 0, weights, weights * finished).sum(dim=-1, keepdim=True)
        sums += [mean, torch.logsumexp(finished, dim=-1, keepdim=True)]
    kept = min(k, raw.shape[1])
    best, best_places = ordered_topk(raw.float().masked_fill(raw.isnan(), float("-inf")), kept)
    best = torch.nn.functional.pad(best, (0, k - kept), value=float("-inf"))
    best_ids = torch.nn.functional.pad(ids[best_places], (0, k - kept), value=-1).to(torch.int32)
    return torch.cat([best.view(torch.int32), best_ids, torch.cat(sums, dim=1).float().view(torch.int32)], dim=1)


def _merge(
    packed: torch.Tensor,
    k: int,
    scale: float | None,
    cap: float | None,
    exponents: torch.Tensor | None,
    *,
    with_moments: bool,
) -> Choices:
    """The choices among all ranks' `_local_best`, int32 [rows, ranks * (2 * k + sums)]."""
    ranks = packed.view(packed.shape[0], -1, 2 * k + (3 if with_moments else 1))
    raw = ranks[..., :k].contiguous().view(torch.float32).flatten(1)
    token_ids = ranks[..., k : 2 * k].flatten(1).to(torch.int64)
    log_zs, *moments = ranks[..., 2 * k :].contiguous().view(torch.float32).unbind(dim=-1)
    missing = token_ids < 0
    by_id = token_ids.masked_fill(missing, 1 << 40).argsort(dim=-1, stable=True)
    raw, token_ids, missing = (part.gather(-1, by_id) for part in (raw, token_ids, missing))
    best, places = ordered_topk(raw, k)
    finished, missing = _finish(best, scale, cap), missing.gather(-1, places)
    log_z = torch.logsumexp(log_zs, dim=-1, keepdim=True)
    log_probs = ((finished if exponents is None else exponents * finished) - log_z).clamp(max=0.0)
    log_probs = log_probs.masked_fill(missing, float("-inf"))
    token_ids = token_ids.gather(-1, places).masked_fill(missing, 0)
    if not with_moments:
        return Choices(log_probs, token_ids)
    means, plain = moments
    shares = torch.exp(log_zs - log_z)
    mean = torch.where(shares == 0, shares, shares * means).sum(dim=-1)
    return Choices(log_probs, token_ids, finished, mean, torch.logsumexp(plain, dim=-1))


def _tokens(columns: Columns, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns of this rank's logits that are tokens, and which: the shard's padding is left out."""
    org, added = torch.arange(columns.org, device=device), torch.arange(columns.added, device=device)
    places = torch.cat([org, added + columns.added_start])
    return places, torch.cat([org + columns.first_org_id, added + columns.first_added_id])


def _finish(logits: torch.Tensor, scale: float | None, cap: float | None) -> torch.Tensor:
    """What the target does to its logits: neither changes the argmax, both change probabilities."""
    if scale is not None:
        logits = logits * scale
    if cap:
        logits = cap * torch.tanh(logits / cap)
    return logits
