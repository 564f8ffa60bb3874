# SPDX-License-Identifier: Apache-2.0
"""What a step without a draft reads and hands back by names that differ between releases."""

from __future__ import annotations

from typing import Any


#: The draft state's attribute with the bonus tokens.
BONUS = "verified_id"


def no_drafts(requests: int) -> dict[str, Any]:
    """What the result of a step says of its drafts, for so many requests."""
    return {"num_accepted_drafts": 0, "num_accepted_drafts_per_req_cpu": [0] * requests}
