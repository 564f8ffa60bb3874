# SPDX-License-Identifier: Apache-2.0
"""What a request counts of its verify steps."""

from __future__ import annotations

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def count_step(req: Req, accepted: int) -> None:
    """Count one verify step, and the draft tokens of it that the request kept."""
    req.spec_verify_ct += 1
    req.spec_accepted_drafts += accepted
    req.update_spec_acceptance_histogram(accepted)
