# SPDX-License-Identifier: Apache-2.0
"""What else a verify input says about a step."""

from __future__ import annotations

from typing import Any


def plan_fields(target_worker: Any, batch: Any, lens: Any, slots: Any) -> dict[str, Any]:
    """Further fields of a verify input: where it reads and writes KV."""
    plan = target_worker.model_runner.kv_index_translator.plan(
        req_pool_indices=batch.req_pool_indices,
        seq_lens=batch.seq_lens,
        seq_lens_cpu=lens if batch.seq_lens_cpu is None else batch.seq_lens_cpu,
        write_virtual=slots.reshape(-1),
        read_extent=slots.shape[1],
    )
    return {"kv_loc_plan": plan}
