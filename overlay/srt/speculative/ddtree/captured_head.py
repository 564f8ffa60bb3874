# SPDX-License-Identifier: Apache-2.0
"""The draft head inside the draft's CUDA graph: after a replay its choices are there, for no further launch."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.speculative.ddtree.draft_head import Choices, DraftHead


def draft_rows(draft_hidden: torch.Tensor, block_size: int) -> torch.Tensor:
    """The hidden states that say something about a token to draft, [bs * (block_size - 1), hidden].

    Args:
        draft_hidden: [bs * block_size, hidden] or [bs, block_size, hidden]; the first row of a block is about the bonus
            token, which is known.
    """
    hidden_size = draft_hidden.shape[-1]
    return draft_hidden.view(-1, block_size, hidden_size)[:, 1:].reshape(-1, hidden_size)


def by_position(choices: Choices, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and token ids of each request's positions, [bs, block_size - 1, K]."""
    positions = block_size - 1
    return (
        choices.log_probs.view(-1, positions, choices.log_probs.shape[-1]),
        choices.token_ids.view(-1, positions, choices.token_ids.shape[-1]),
    )


class CapturedHead:
    """What SGLang calls behind the draft's forward while it captures its graphs: its greedy head's place.

    Each graph has choices of its own, found again by the address of the hidden states that the graph gives: no other
    tensor can have it. They are copied out of the graphs' memory, where a later replay of the target may write, into
    tensors that the warm-up before a capture has left; a graph without such a warm-up is not known.

    With several lanes every step gets the choices of the widest, and a narrower tree is built of the first of them. The
    head takes hardly longer for more of them, since most of its time is its matrix product's: graphs by lane, or
    launches outside a graph, would cost more than they save.

    Args:
        head: The draft head.
        block_size: Tokens of a draft block.
        topk: Choices a position.
        exponents: As in `DraftHead.top_log_probs`; their tensor is read anew by every replay.
        moments: As there.
    """

    def __init__(
        self,
        head: DraftHead,
        *,
        block_size: int,
        topk: int,
        exponents: torch.Tensor | None = None,
        moments: bool = True,
    ) -> None:
        self._head, self._block_size, self._topk = head, block_size, topk
        self._exponents, self._moments = exponents, moments
        self._kept: dict[int, Choices] = {}  # by rows
        self._captured: dict[int, Choices] = {}

    def __call__(self, hidden_states: torch.Tensor, input_ids: Any = None) -> None:
        """Choose behind a forward: a warm-up leaves the tensors that a capture's choices go to.

        Args:
            hidden_states: [bs * block_size, hidden].
            input_ids: Of no use here.
        """
        own = draft_rows(hidden_states, self._block_size)
        choices = self._head.top_log_probs(own, self._topk, self._exponents, moments=self._moments)
        rows = choices.log_probs.shape[0]
        if not torch.cuda.is_current_stream_capturing():
            self._kept.setdefault(rows, choices)
        elif rows in self._kept:
            kept = self._kept[rows]
            for name, value in vars(choices).items():
                if value is not None:
                    getattr(kept, name).copy_(value)
            self._captured[hidden_states.data_ptr()] = kept

    def choices_of(self, draft_hidden: torch.Tensor) -> Choices | None:
        """The choices of a replay's hidden states, or None if no graph gave them.

        Args:
            draft_hidden: [bs * block_size, hidden]; a graph of a larger batch has more rows.
        """
        choices = self._captured.get(draft_hidden.data_ptr())
        if choices is None:
            return None
        rows = draft_hidden.shape[0] // self._block_size * (self._block_size - 1)
        fields = {name: getattr(choices, name) for name in choices.__dataclass_fields__}
        return Choices(**{name: None if value is None else value[:rows] for name, value in fields.items()})
