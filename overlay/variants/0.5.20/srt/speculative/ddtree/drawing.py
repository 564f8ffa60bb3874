# SPDX-License-Identifier: Apache-2.0
"""How the engine's sampler draws a token."""

from __future__ import annotations

from typing import Any


def draw(sampler: Any, probs: Any, sampling_info: Any, positions: Any, simple: bool) -> Any:
    """One token per row of probabilities, as plain decoding draws it."""
    sampling_info.sampling_mask_batch_indices = None  # of requests that ask for it, which are refused
    return sampler._sample_from_probs(probs, sampling_info, positions, simple)[0]
