# SPDX-License-Identifier: Apache-2.0
"""srt/managers/tp_worker.py: the longest request that is admitted."""

from __future__ import annotations

from ddtree_overlay.edits.anchors import After
from ddtree_overlay.edits.base import Edit, Example, insert_statements


EXAMPLE = Example(
    before="""\
class TpModelWorker:
    def get_worker_info(self):
        max_req_len = min(self.model_config.context_len - 1, self.pool_size - 1)
        return (max_req_len, max_req_len - 5)
""",
    after="""\
class TpModelWorker:
    def get_worker_info(self):
        max_req_len = min(self.model_config.context_len - 1, self.pool_size - 1)
        from sglang.srt.speculative.ddtree.request_length import longest_request

        max_req_len = longest_request(self.model_runner, max_req_len)
        return (max_req_len, max_req_len - 5)
""",
)

LONGEST_REQUEST = insert_statements(
    "TpModelWorker.get_worker_info",
    After("max_req_len = min(...)"),
    """\
from sglang.srt.speculative.ddtree.request_length import longest_request

max_req_len = longest_request(self.model_runner, max_req_len)
""",
    reason="A request that fills the pool leaves no room for a step of its own, and would be aborted half-way.",
)

TP_WORKER = Edit(
    path="srt/managers/tp_worker.py",
    summary="Admit only requests whose last step fits into the KV pool beside their own tokens.",
    insertions=(LONGEST_REQUEST,),
    examples=(EXAMPLE,),
)
