# SPDX-License-Identifier: Apache-2.0
"""Draft hidden states to the drafter's best tokens per position, over a vocabulary that may be sharded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.speculative.ddtree.tree import ordered_topk


_READABLE = (torch.float32, torch.float16, torch.bfloat16)

#: Most bytes of logits held at once; more rows are read in several goes.
_LOGITS_BYTES = 512 << 20


@dataclass(frozen=True)
class Choices:
    """The drafter's best k tokens of each draft position, by falling logit, equal ones by rising token id."""

    #: Log-softmax of exponent * logits over the whole vocabulary, float32 [rows, k], at most 0; NaN where a row's
    #: logits hold one.
    log_probs: torch.Tensor
    #: int64 [rows, k].
    token_ids: torch.Tensor
    #: With exponents: logits as the target finishes them (scale, soft cap), float32 [rows, k]; else None.
    logits: torch.Tensor | None = None
    #: With exponents: mean and variance of the finished logit under softmax(exponent * logits), whole vocabulary,
    #: float32 [rows]; else None.
    mean: torch.Tensor | None = None
    variance: torch.Tensor | None = None
    #: With exponents: logarithm of the partition sum at exponent 1, float32 [rows]; else None.
    plain_log_z: torch.Tensor | None = None


class DraftHead:
    """The target's language-model head, read for log-probabilities instead of an argmax.

    Args:
        lm_head: A vocabulary-parallel head with an unquantised `weight` [local rows, hidden] and `shard_indices`.
        logits_processor: The target's, for the soft cap and scale that its own logits get; either may be absent.
        group: The tensor-parallel group: `world_size` and `all_gather(tensor, dim)`.

    Raises:
        ValueError: The head is quantised, or is none of SGLang's vocabulary-parallel heads.
    """

    def __init__(self, lm_head: Any, logits_processor: Any, group: Any) -> None:
        dtype = getattr(getattr(lm_head, "weight", None), "dtype", None)
        if dtype not in _READABLE or not hasattr(lm_head, "shard_indices"):
            raise ValueError(
                f"DDTREE reads draft probabilities from the target's lm_head and cannot read {type(lm_head).__name__} "
                f"of {dtype}. Use a model whose lm_head is vocabulary-parallel and not quantised, or "
                "--speculative-algorithm DFLASH."
            )
        self._lm_head = lm_head  # its weight is read at every use: a weight update may replace the tensor
        self._shard = lm_head.shard_indices
        self._scale = getattr(logits_processor, "logit_scale", None)
        self._softcap = getattr(logits_processor, "final_logit_softcapping", None)
        self._group = group

    def top_log_probs(self, hidden_states: torch.Tensor, k: int, exponents: torch.Tensor | None = None) -> Choices:
        """The k most likely tokens of each row under the drafter.

        The log-probabilities are normalised over the whole vocabulary, not over the k: positions compete in one tree.
        Every rank gets the same answer: k candidates and one partition sum per row are gathered, never the logits.

        Args:
            hidden_states: [rows, hidden].
            k: At least 1; cut to the vocabulary's size.
            exponents: Positive exponents of the probabilities by draft position, float32 [L]; row r is about position
                r % L. None for all 1, and for no logits, means and variances.
        """
        weight = self._lm_head.weight
        per_go = max(1, _LOGITS_BYTES // (weight.shape[0] * weight.element_size()))
        if exponents is not None:
            per_go = max(1, per_go // len(exponents)) * len(exponents)
        goes = [self._choose(rows, k, exponents) for rows in hidden_states.split(per_go)]
        if len(goes) == 1:
            return goes[0]
        fields = ("log_probs", "token_ids", "logits", "mean", "variance", "plain_log_z")
        parts = {name: [getattr(choices, name) for choices in goes] for name in fields}
        return Choices(**{name: None if part[0] is None else torch.cat(part) for name, part in parts.items()})

    def _choose(self, hidden_states: torch.Tensor, k: int, exponents: torch.Tensor | None) -> Choices:
        weight = self._lm_head.weight
        logits = torch.matmul(hidden_states.to(weight.dtype), weight.T)
        if exponents is not None:
            exponents = exponents.repeat(-(-len(logits) // len(exponents)))[: len(logits)].unsqueeze(1)
        packed = self._local_best(logits, k, exponents)
        if self._group.world_size > 1:
            packed = self._group.all_gather(packed, dim=-1)
        return self._merge(packed, k, exponents)

    def _local_best(self, logits: torch.Tensor, k: int, exponents: torch.Tensor | None) -> torch.Tensor:
        """What the other ranks have to know of this one's logits, in one tensor.

        Returns:
            int32 [rows, 2 * k + 4]: the bits of k raw logits, their token ids, and the bits of the partition sum's
            logarithm, the mean, the variance, and the logarithm at exponent 1.
        """
        columns, ids = self._local_tokens(logits.device)
        raw = logits[:, columns].float()
        finished = self._finish(raw)
        scaled = finished if exponents is None else exponents * finished
        log_z = torch.logsumexp(scaled, dim=-1, keepdim=True)
        weights = torch.exp(scaled - log_z)
        mean = torch.where(weights > 0, weights * finished, weights).sum(dim=-1, keepdim=True)
        spread = torch.where(weights > 0, weights * (finished - mean) ** 2, weights).sum(dim=-1, keepdim=True)
        kept = min(k, raw.shape[1])
        best, places = ordered_topk(raw.masked_fill(raw.isnan(), float("-inf")), kept)
        best = torch.nn.functional.pad(best, (0, k - kept), value=float("-inf"))
        best_ids = torch.nn.functional.pad(ids[places], (0, k - kept)).to(torch.int32)
        plain = log_z if exponents is None else torch.logsumexp(finished, dim=-1, keepdim=True)
        sums = torch.cat([log_z, mean, spread, plain], dim=1)
        return torch.cat([best.view(torch.int32), best_ids, sums.view(torch.int32)], dim=1)

    def _merge(self, packed: torch.Tensor, k: int, exponents: torch.Tensor | None) -> Choices:
        """The choices among all ranks' `_local_best`, int32 [rows, ranks * (2 * k + 4)]."""
        ranks = packed.view(packed.shape[0], -1, 2 * k + 4)
        raw = ranks[..., :k].contiguous().view(torch.float32).flatten(1)
        token_ids = ranks[..., k : 2 * k].flatten(1).to(torch.int64)
        log_zs, means, spreads, plain = ranks[..., 2 * k :].contiguous().view(torch.float32).unbind(dim=-1)
        by_id = token_ids.argsort(dim=-1, stable=True)
        raw, token_ids = raw.gather(-1, by_id), token_ids.gather(-1, by_id)
        best, places = ordered_topk(raw, min(k, raw.shape[-1]))
        finished = self._finish(best)
        log_z = torch.logsumexp(log_zs, dim=-1, keepdim=True)
        log_probs = (finished if exponents is None else exponents * finished) - log_z
        choices = Choices(log_probs.clamp(max=0.0), token_ids.gather(-1, places))
        if exponents is None:
            return choices
        shares = torch.exp(log_zs - log_z)
        mean = (shares * means).sum(dim=-1)
        variance = (shares * (spreads + (means - mean.unsqueeze(1)) ** 2)).sum(dim=-1)
        return Choices(choices.log_probs, choices.token_ids, finished, mean, variance, torch.logsumexp(plain, dim=-1))

    def _local_tokens(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Columns of this rank's logits that are tokens, and which: the shard's padding is left out."""
        shard = self._shard
        org = torch.arange(shard.num_org_elements, device=device)
        added = torch.arange(shard.num_added_elements, device=device)
        columns = torch.cat([org, added + shard.num_org_elements_padded])
        return columns, torch.cat([org + shard.org_vocab_start_index, added + shard.added_vocab_start_index])

    def _finish(self, logits: torch.Tensor) -> torch.Tensor:
        """What the target does to its logits: neither changes the argmax, both change probabilities."""
        if self._scale is not None:
            logits = logits * self._scale
        if self._softcap:
            logits = self._softcap * torch.tanh(logits / self._softcap)
        return logits
