# SPDX-License-Identifier: Apache-2.0
"""Which of its runner's pools a draft's forward batch carries."""

from __future__ import annotations

from typing import Any


def draft_pools(model_runner: Any) -> dict[str, Any]:
    """Fields of the forward batch of the drafter's model runner."""
    return {
        "req_to_token_pool": model_runner.req_to_token_pool,
        "token_to_kv_pool": model_runner.token_to_kv_pool,
        "attn_backend": model_runner.attn_backend,
    }
