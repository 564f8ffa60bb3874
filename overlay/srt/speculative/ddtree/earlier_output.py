# SPDX-License-Identifier: Apache-2.0
"""Penalties of a request that was retracted go on from what it has said, instead of starting anew.

SGLang counts a request's output from its prefill on. One that lost its KV is prefilled again with its output, and what
it said before would be penalised no more, and `min_new_tokens` be asked of it a second time.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.sampling import penaltylib


def count_earlier_output(penalizers: Any, reqs: list[Any]) -> None:
    """Count what each request has said before its prefill.

    Args:
        penalizers: Those of the batch that is prefilled, in which nothing is counted yet.
        reqs: The batch's requests.
    """
    if not penalizers.is_required:
        return
    known = penalizers.penalizers
    frequency, presence, repetition, least = (
        known[kind]
        for kind in (
            penaltylib.BatchedFrequencyPenalizer,
            penaltylib.BatchedPresencePenalizer,
            penaltylib.BatchedRepetitionPenalizer,
            penaltylib.BatchedMinNewTokensPenalizer,
        )
    )
    for row, req in enumerate(reqs):
        if not req.output_ids:
            continue
        said = torch.tensor(list(req.output_ids), dtype=torch.int64).to(penalizers.device)
        if frequency.is_prepared():
            penalty = frequency.frequency_penalties[row].expand(len(said))
            frequency.cumulated_frequency_penalties[row].index_add_(0, said, penalty)
        if presence.is_prepared():
            presence.cumulated_presence_penalties[row, said] = presence.presence_penalties[row]
        if repetition.is_prepared():
            repetition.cumulated_repetition_penalties[row, said] = repetition.repetition_penalties[row]
        if least.is_prepared():
            least.len_output_tokens[row] += len(said)
