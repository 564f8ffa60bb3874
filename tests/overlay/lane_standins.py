# SPDX-License-Identifier: Apache-2.0
"""Arguments and model runners as far as lanes look at them."""

from __future__ import annotations

from types import SimpleNamespace


def arguments(budget: object = "auto", listed: object = None, **changed: object) -> SimpleNamespace:
    """Resolved arguments: block 16."""
    base: dict[str, object] = {
        "speculative_algorithm": "DDTREE",
        "speculative_ddtree_budget": budget,
        "speculative_ddtree_budgets": listed,
        "speculative_dflash_block_size": 16,
        "max_running_requests": 48,
    }
    return SimpleNamespace(**(base | changed))


def target(**changed: object) -> SimpleNamespace:
    """A target's model runner; on a CPU nothing limits its graphs but their use."""
    padded = SimpleNamespace(disable_cuda_graph_padding=False)
    base: dict[str, object] = {"is_draft_worker": False, "server_args": padded}
    return SimpleNamespace(**(base | changed))
