# SPDX-License-Identifier: Apache-2.0
"""Draft hidden states to the drafter's best tokens per position, over a vocabulary that may be sharded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


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
    #: With moments: logits as the target finishes them (scale, soft cap), float32 [rows, k]; else None.
    logits: torch.Tensor | None = None
    #: With moments: mean of the finished logit under softmax(exponent * logits), whole vocabulary, float32 [rows];
    #: else None.
    mean: torch.Tensor | None = None
    #: With moments: logarithm of the partition sum at exponent 1, float32 [rows]; else None.
    plain_log_z: torch.Tensor | None = None


@dataclass(frozen=True)
class Columns:
    """Which columns of a rank's logits are which tokens: two runs, the original vocabulary's and the added tokens'."""

    org: int
    first_org_id: int
    added_start: int
    added: int
    first_added_id: int

    @classmethod
    def of(cls, shard: Any) -> Columns:
        """Those of a head with SGLang's `shard_indices`."""
        return cls(
            org=int(shard.num_org_elements),
            first_org_id=int(shard.org_vocab_start_index),
            added_start=int(shard.num_org_elements_padded),
            added=int(shard.num_added_elements),
            first_added_id=int(shard.added_vocab_start_index),
        )


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
        self._columns = Columns.of(lm_head.shard_indices)
        self._scale = getattr(logits_processor, "logit_scale", None)
        self._softcap = getattr(logits_processor, "final_logit_softcapping", None)
        self._group = group

    @classmethod
    def of(cls, model: Any, group: Any) -> DraftHead:
        """That of a target's model."""
        return cls(getattr(model, "lm_head", None), getattr(model, "logits_processor", None), group)

    @property
    def hidden_size(self) -> int:
        """Of a row that it reads."""
        return int(self._lm_head.weight.shape[1])

    def top_log_probs(
        self, hidden_states: torch.Tensor, k: int, exponents: torch.Tensor | None = None, *, moments: bool = True
    ) -> Choices:
        """The k most likely tokens of each row under the drafter.

        The log-probabilities are normalised over the whole vocabulary, not over the k: positions compete in one tree.
        Every rank gets the same answer: k candidates and one partition sum per row (with moments also the mean and the
        plain sum) are gathered, never the logits.

        Args:
            hidden_states: [rows, hidden].
            k: At least 1; cut to the vocabulary's size.
            exponents: Positive exponents of the probabilities by draft position, float32 [L]; row r is about position
                r % L. None for all 1, and for no moments.
            moments: Whether exponents come with what their fit needs: logits, means and plain sums.
        """
        weight = self._lm_head.weight
        per_go = max(1, _LOGITS_BYTES // (weight.shape[0] * weight.element_size()))
        if exponents is not None:
            per_go = max(1, per_go // len(exponents)) * len(exponents)
        goes = [self._choose(rows, k, exponents, moments) for rows in hidden_states.split(per_go)]
        if len(goes) == 1:
            return goes[0]
        fields = ("log_probs", "token_ids", "logits", "mean", "plain_log_z")
        parts = {name: [getattr(choices, name) for choices in goes] for name in fields}
        return Choices(**{name: None if part[0] is None else torch.cat(part) for name, part in parts.items()})

    def _choose(self, hidden_states: torch.Tensor, k: int, exponents: torch.Tensor | None, moments: bool) -> Choices:
        weight = self._lm_head.weight
        logits = torch.matmul(hidden_states.to(weight.dtype), weight.T)
        if logits.is_cuda:
            from sglang.srt.speculative.ddtree.head_kernel import choose
        else:
            from sglang.srt.speculative.ddtree.head_reference import choose
        finish = {"scale": self._scale, "cap": self._softcap}
        return choose(logits, k, self._columns, exponents=exponents, moments=moments, group=self._group, **finish)
