# SPDX-License-Identifier: Apache-2.0
"""srt/mem_cache/allocation.py: what a step has reserved is read once, not request by request."""

from __future__ import annotations

from ddtree_overlay.edits.anchors import Before
from ddtree_overlay.edits.base import Edit, Example, insert_statements


EXAMPLE = Example(
    before="""\
def alloc_for_spec_decode(tree_cache, *, reqs, nxt_kv_lens_cpu, batch=None):
    for i, req in enumerate(reqs):
        req.kv.kv_allocated_len = max(req.kv.kv_allocated_len, int(nxt_kv_lens_cpu[i]))
""",
    after="""\
def alloc_for_spec_decode(tree_cache, *, reqs, nxt_kv_lens_cpu, batch=None):
    if batch is not None and batch.spec_algorithm.is_ddtree():
        nxt_kv_lens_cpu = nxt_kv_lens_cpu.tolist()
    for i, req in enumerate(reqs):
        req.kv.kv_allocated_len = max(req.kv.kv_allocated_len, int(nxt_kv_lens_cpu[i]))
""",
)

ALLOCATION = Edit(
    path="srt/mem_cache/allocation.py",
    summary="Read the reserved lengths of a decode step once.",
    insertions=(
        insert_statements(
            "alloc_for_spec_decode",
            Before("for i, req in enumerate(reqs):\n    req.kv.kv_allocated_len = max(...)"),
            """\
if batch is not None and batch.spec_algorithm.is_ddtree():
    nxt_kv_lens_cpu = nxt_kv_lens_cpu.tolist()
""",
            reason="A number read out of a tensor is two operations of PyTorch, for every request of every step.",
        ),
    ),
    examples=(EXAMPLE,),
)
