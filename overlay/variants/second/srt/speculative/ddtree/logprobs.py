# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of the emitted tokens."""

from __future__ import annotations

from typing import Any


def add_logprobs(batch: Any, logits_output: Any, acceptance: Any) -> None:
    """Log-probabilities of the emitted tokens; this release refuses to report them for DFLASH."""
