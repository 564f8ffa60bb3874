# SPDX-License-Identifier: Apache-2.0
"""One target token per tree node: argmax for greedy requests, one sample for the others."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.sampler import SYNC_TOKEN_IDS_ACROSS_TP, apply_custom_logit_processor
from sglang.srt.speculative.ddtree.drawing import draw
from sglang.srt.speculative.ddtree.nan_logits import replaces_nan
from sglang.srt.speculative.ddtree.processed import processed


#: Most bytes of probabilities held at once while sampling.
_PROBS_BYTES = 256 << 20


def adjust_logits(logits: torch.Tensor, sampling_info: Any, width: int) -> None:
    """Apply penalties, logit bias and custom logit processors to the nodes' logits, in place and in plain order.

    Penalties and custom processors see the roots alone, one row a request as in plain decoding. What a penalty is
    deeper in a tree depends on the path; processors walk over their parameters and take the row of the same number, and
    some read the request's output, which knows nothing of a path. `roots_only` says which requests stay at the root.

    Args:
        logits: [bs * width, vocabulary].
        width: Nodes per request.
    """
    nodes = logits.view(-1, width, logits.shape[1])
    if sampling_info.penalizer_orchestrator.is_required:
        # Not with `repeat`: that adds before it scales, where a plain step takes the penalizers as they come.
        sampling_info.penalizer_orchestrator.apply(nodes[:, 0])
    adjust_without_penalties(logits, sampling_info, width)


def adjust_without_penalties(
    logits: torch.Tensor, sampling_info: Any, width: int, constrain: Callable[[torch.Tensor], None] | None = None
) -> None:
    """Apply grammars, logit bias and custom logit processors, as `adjust_logits` does behind the penalties.

    Args:
        logits: [bs * width, vocabulary].
        sampling_info: The batch's; None: there is nothing but grammars.
        width: Nodes per request.
        constrain: Forbids what the grammars do not allow. Processors come behind it: one that holds a request to a
            token does so whatever the grammar says, as in plain decoding.
    """
    if constrain is not None:
        constrain(logits)
    if sampling_info is None:
        return
    nodes = logits.view(-1, width, logits.shape[1])
    if sampling_info.logit_bias is not None:
        nodes.add_(sampling_info.logit_bias.unsqueeze(1))
    if sampling_info.has_custom_logit_processor:
        apply_custom_logit_processor(nodes[:, 0], sampling_info)


def count_roots(sampling_info: Any, roots: torch.Tensor, sampling_params: list[Any]) -> torch.Tensor | None:
    """Count each request's last token for its penalties, as plain decoding does before a step.

    SGLang leaves the counting to the speculative worker. What a penalty is deeper in a tree depends on the path to the
    node, so a penalised request takes the root's token only: one exact token a step, as without speculation.

    Args:
        roots: The last emitted token of each request, int64 [bs].
        sampling_params: Of each request.

    Returns:
        Which requests are penalised, bool [bs], or None when none is.
    """
    if sampling_info is None or not sampling_info.penalizer_orchestrator.is_required:
        return None
    sampling_info.penalizer_orchestrator.cumulate_output_tokens(roots)
    return torch.tensor([is_penalised(params) for params in sampling_params], device=roots.device)


def roots_only(sampling_info: Any, penalised: torch.Tensor | None) -> torch.Tensor | None:
    """Which requests take the root's token only, bool [bs], or None: the penalised, and those with a processor."""
    if sampling_info is None or not sampling_info.has_custom_logit_processor:
        return penalised
    own = processed(sampling_info)
    return own if penalised is None else penalised | own


def is_penalised(params: Any) -> bool:
    """Whether what a request may say next depends on what it has said."""
    changed = params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0
    return bool(changed or params.min_new_tokens > 0)


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
        if replaces_nan(self._sampler):
            logits = logits.nan_to_num(nan=-1e5, posinf=float("inf"), neginf=float("-inf"))
        greedy = torch.argmax(logits, dim=-1)
        if sampling_info is None or sampling_info.is_all_greedy:
            # Ranks gather the same logits. Who does not trust their kernels sets SGLang's variable.
            return (self._first_ranks(greedy) if SYNC_TOKEN_IDS_ACROSS_TP else greedy).view(-1, width)
        per_node = _repeat(sampling_info, width)
        simple = not (per_node.need_top_p_sampling or per_node.need_top_k_sampling or per_node.need_min_p_sampling)
        rows = max(1, _PROBS_BYTES // (4 * logits.shape[1]))
        sampled = [
            draw(
                self._sampler,
                torch.softmax(logits[part].float() / per_node.temperatures[part], dim=-1),
                _rows_of(per_node, part),
                positions[part],
                simple,
            )
            for part in (slice(start, start + rows) for start in range(0, logits.shape[0], rows))
        ]
        # SGLang turns temperature 0 into top-k 1; a sampler's own tie-break must not decide a greedy request.
        tokens = torch.where(per_node.top_ks == 1, greedy, torch.cat(sampled).to(torch.int64))
        return self._first_ranks(tokens).view(-1, width)

    def _first_ranks(self, tokens: torch.Tensor) -> torch.Tensor:
        """The first rank's tokens, on every rank."""
        if self._group.world_size == 1:
            return tokens
        sent: torch.Tensor = self._group.broadcast(tokens, src=0)
        return sent


_PER_REQUEST = ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed")
_FLAGS = ("need_top_p_sampling", "need_top_k_sampling", "need_min_p_sampling")
#: What samplers of some releases (0.5.22 and later) read beside them: a number no `top_ks` is above, or None.
_HINTS = ("max_top_k",)


def _repeat(sampling_info: Any, width: int) -> SimpleNamespace:
    """The sampling parameters of each request, once per node."""
    fields = {name: getattr(sampling_info, name) for name in _PER_REQUEST}
    return SimpleNamespace(
        **{name: None if value is None else value.repeat_interleave(width, dim=0) for name, value in fields.items()},
        **{name: getattr(sampling_info, name) for name in _FLAGS},
        **{name: getattr(sampling_info, name, None) for name in _HINTS},
    )


def _rows_of(per_node: SimpleNamespace, part: slice) -> SimpleNamespace:
    """The parameters of some nodes."""
    fields = {name: getattr(per_node, name) for name in _PER_REQUEST}
    return SimpleNamespace(
        **{name: None if value is None else value[part] for name, value in fields.items()},
        **{name: getattr(per_node, name) for name in (*_FLAGS, *_HINTS)},
    )
