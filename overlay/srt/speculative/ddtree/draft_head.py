# SPDX-License-Identifier: Apache-2.0
"""Draft hidden states to the drafter's best tokens per position, over a vocabulary that may be sharded."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.speculative.ddtree.tree import ordered_topk


_READABLE = (torch.float32, torch.float16, torch.bfloat16)

#: Rows of logits held in memory at once.
_ROWS_PER_CHUNK = 128


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

    def top_log_probs(self, hidden_states: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The k most likely tokens of each row under the drafter, ties by the lower token id.

        The log-probabilities are normalised over the whole vocabulary, not over the k: positions compete in one tree.
        Every rank gets the same answer: k candidates and one partition sum per row are gathered, never the logits.

        Args:
            hidden_states: [rows, hidden].
            k: At least 1; cut to the vocabulary's size.

        Returns:
            Log-probabilities float32 [rows, k] and token ids int64 [rows, k].
        """
        chunks = [self._local_topk(rows, k) for rows in hidden_states.split(_ROWS_PER_CHUNK)]
        logits, token_ids, log_z = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        if self._group.world_size > 1:
            logits = self._group.all_gather(logits, dim=-1)
            token_ids = self._group.all_gather(token_ids, dim=-1)
            log_z = self._group.all_gather(log_z, dim=-1)
        return merge_topk(logits, token_ids, log_z, k)

    def _local_topk(self, hidden_states: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """This rank's candidates, padded to k: logits, ids of the whole vocabulary, and logsumexp [rows, 1]."""
        ids = self._local_token_ids(hidden_states.device)
        weight = self._lm_head.weight[self._local_rows()]
        logits = self._finish(torch.matmul(hidden_states.to(weight.dtype), weight.T).float())
        log_z = torch.logsumexp(logits, dim=-1, keepdim=True)
        kept = min(k, logits.shape[1])
        values, columns = ordered_topk(logits.masked_fill(logits.isnan(), float("-inf")), kept)
        pad = (0, k - kept)
        values = torch.nn.functional.pad(values, pad, value=float("-inf"))
        return values, torch.nn.functional.pad(ids[columns], pad), log_z

    def _local_rows(self) -> slice | torch.Tensor:
        """Rows of the local weight that hold tokens; the shard's padding is left out."""
        shard = self._shard
        if shard.num_added_elements == 0:
            return slice(0, shard.num_org_elements)
        device = self._lm_head.weight.device
        org = torch.arange(shard.num_org_elements, device=device)
        added = torch.arange(shard.num_added_elements, device=device) + shard.num_org_elements_padded
        return torch.cat([org, added])

    def _local_token_ids(self, device: torch.device) -> torch.Tensor:
        shard = self._shard
        org = torch.arange(shard.num_org_elements, device=device) + shard.org_vocab_start_index
        added = torch.arange(shard.num_added_elements, device=device) + shard.added_vocab_start_index
        return torch.cat([org, added])

    def _finish(self, logits: torch.Tensor) -> torch.Tensor:
        """What the target does to its logits: neither changes the argmax, both change probabilities."""
        if self._scale is not None:
            logits = logits * self._scale
        if self._softcap:
            logits = self._softcap * torch.tanh(logits / self._softcap)
        return logits


def merge_topk(
    logits: torch.Tensor, token_ids: torch.Tensor, log_z: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the candidates of all ranks.

    Args:
        logits: float32 [rows, ranks * k], -inf where a rank had fewer candidates.
        token_ids: int64 [rows, ranks * k].
        log_z: Partition sums, float32 [rows, ranks].

    Returns:
        Log-probabilities float32 [rows, <= k] and token ids int64 [rows, <= k].
    """
    by_id = token_ids.argsort(dim=-1, stable=True)
    logits, token_ids = logits.gather(-1, by_id), token_ids.gather(-1, by_id)
    values, columns = ordered_topk(logits, min(k, logits.shape[-1]))
    log_probs = values - torch.logsumexp(log_z, dim=-1, keepdim=True)
    return log_probs.clamp(max=0.0), token_ids.gather(-1, columns)
