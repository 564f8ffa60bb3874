# SPDX-License-Identifier: Apache-2.0
"""Penalties that count what a request has generated, exact with overlap scheduling.

What a penalty is deeper in a tree depends on the path to the node, so a penalised request takes the root's token only:
one exact token a step, as without speculation. The scheduler does not count tokens for speculative workers, and it
would be a step late; the root is counted here, on the device, before the verify is launched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties
from sglang.srt.speculative.ddtree.targets import is_penalised


if TYPE_CHECKING:
    from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2


@dataclass(frozen=True)
class RootPenalties:
    """The penalties of one step, in tensors of its own."""

    #: Which requests are penalised, bool [bs].
    requests: torch.Tensor
    #: Added to the logits, float32 [bs, vocabulary].
    additive: torch.Tensor
    #: Multiplies negative and divides positive logits, float32 [bs, vocabulary], or None.
    scaling: torch.Tensor | None

    def apply(self, root_logits: torch.Tensor) -> None:
        """Penalise the roots' logits in place, in plain decoding's order.

        Args:
            root_logits: [bs, vocabulary]; may be a view with gaps between its rows.
        """
        root_logits.add_(self.additive)
        if self.scaling is not None:
            apply_scaling_penalties(root_logits, self.scaling)


def root_penalties(draft_input: DFlashDraftInputV2, roots: torch.Tensor, reqs: list[Any]) -> RootPenalties | None:
    """Count each request's last token and take the penalties that hold for its next one; None when there are none.

    Args:
        draft_input: Holds the batch's penalties, which only the scheduler knows otherwise.
        roots: The last emitted token of each request, int64 [bs].
        reqs: The batch's requests.
    """
    penalizers = draft_input.penalizer_orchestrator
    if penalizers is None or not penalizers.is_required:
        return None
    penalizers.cumulate_output_tokens(roots)
    additive = torch.zeros((len(reqs), penalizers.vocab_size), dtype=torch.float32, device=roots.device)
    penalizers.accumulate_additive_penalties(additive)
    penalised = torch.tensor([is_penalised(req.sampling_params) for req in reqs], pin_memory=roots.is_cuda)
    return RootPenalties(
        requests=penalised.to(roots.device, non_blocking=True),
        additive=additive,
        scaling=penalizers.accumulate_scaling_penalties(),
    )
