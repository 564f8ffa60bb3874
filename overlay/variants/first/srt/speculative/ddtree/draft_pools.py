# SPDX-License-Identifier: Apache-2.0
"""Which of its runner's pools a draft's forward batch carries."""

from __future__ import annotations

from typing import Any


def draft_pools(runner: Any) -> dict[str, Any]:
    """Fields of the forward batch of the drafter's model runner."""
    return {
        "req_to_token_pool": runner.req_to_token_pool,
        "token_to_kv_pool": runner.token_to_kv_pool,
        "attn_backend": runner.attn_backend,
    }
