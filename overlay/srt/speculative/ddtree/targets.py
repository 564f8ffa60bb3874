# SPDX-License-Identifier: Apache-2.0
"""One target token per tree node: argmax for greedy requests, one sample for the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.sampler import apply_custom_logit_processor


def adjust_logits(logits: torch.Tensor, sampling_info: Any, width: int) -> None:
    """Apply custom logit processors, penalties and logit bias to every node's logits, in place.

    All nodes of a request get the penalties of its committed tokens, as all positions of a DFLASH chain do: tokens on
    the path to a node are not counted before they are committed.

    Args:
        logits: [bs * width, vocabulary].
        width: Nodes per request.
    """
    if sampling_info.has_custom_logit_processor:
        apply_custom_logit_processor(logits, sampling_info, num_tokens_in_batch=width)
    if sampling_info.penalizer_orchestrator.is_required or sampling_info.logit_bias is not None:
        offsets = logits.new_zeros((logits.shape[0] // width, logits.shape[1]), dtype=torch.float32)
        sampling_info.apply_logits_bias(offsets)
        logits.add_(offsets.repeat_interleave(width, dim=0))


class TargetChooser:
    """Chooses target tokens with the engine's own sampler, so that a node samples as plain decoding would.

    Args:
        sampler: The target model runner's `Sampler`.
        group: The tensor-parallel group; samples are taken from its first rank.
    """

    def __init__(self, sampler: Any, group: Any) -> None:
        self._sampler = sampler
        self._group = group

    def choose(self, logits: torch.Tensor, sampling_info: Any, positions: torch.Tensor, width: int) -> torch.Tensor:
        """The target's token after each node, int64 [bs, width].

        Args:
            logits: Adjusted logits [bs * width, vocabulary]; left as they are.
            sampling_info: The batch's, or None for greedy decoding.
            positions: Position of each node's own token, int64 [bs * width]: what seeded sampling is keyed on.
        """
        greedy = torch.argmax(logits, dim=-1)
        if sampling_info is None or sampling_info.is_all_greedy:
            return greedy.view(-1, width)
        per_node = _repeat(sampling_info, width)
        probs = torch.softmax(logits.float() / per_node.temperatures, dim=-1)
        simple = not (per_node.need_top_p_sampling or per_node.need_top_k_sampling or per_node.need_min_p_sampling)
        sampled = self._sampler._sample_from_probs(probs, per_node, positions, simple).to(torch.int64)
        # SGLang turns temperature 0 into top-k 1; a sampler's own tie-break must not decide a greedy request.
        tokens = torch.where(per_node.top_ks == 1, greedy, sampled)
        if self._group.world_size > 1:
            tokens = self._group.broadcast(tokens, src=0)
        return tokens.view(-1, width)


def _repeat(sampling_info: Any, width: int) -> SimpleNamespace:
    """The sampling parameters of each request, once per node."""
    per_request = ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed")
    flags = ("need_top_p_sampling", "need_top_k_sampling", "need_min_p_sampling")
    fields = {name: getattr(sampling_info, name) for name in per_request}
    return SimpleNamespace(
        **{name: None if value is None else value.repeat_interleave(width, dim=0) for name, value in fields.items()},
        **{name: getattr(sampling_info, name) for name in flags},
    )
