# SPDX-License-Identifier: Apache-2.0
"""Where SGLang chooses the batch sizes of its decode graphs: which of them a lane is captured for."""

from __future__ import annotations

from ddtree_overlay.edits.anchors import After
from ddtree_overlay.edits.base import Edit, Example, insert_statements


EXAMPLE = Example(
    before="""\
def get_batch_sizes_to_capture(model_runner, captured_req_width=1):
    capture_bs = list(model_runner.server_args.cuda_graph_config.decode.bs)
    capture_bs = list(sorted(set(capture_bs)))

    assert len(capture_bs) > 0 and capture_bs[0] > 0, f"{capture_bs=}"
    return capture_bs
""",
    after="""\
def get_batch_sizes_to_capture(model_runner, captured_req_width=1):
    capture_bs = list(model_runner.server_args.cuda_graph_config.decode.bs)
    capture_bs = list(sorted(set(capture_bs)))
    from sglang.srt.speculative.ddtree.lane_sizes import lane_batch_sizes

    capture_bs = lane_batch_sizes(model_runner, capture_bs, captured_req_width)

    assert len(capture_bs) > 0 and capture_bs[0] > 0, f"{capture_bs=}"
    return capture_bs
""",
)

LANE_SIZES = insert_statements(
    "get_batch_sizes_to_capture",
    After("capture_bs = list(sorted(set(capture_bs)))"),
    """\
from sglang.srt.speculative.ddtree.lane_sizes import lane_batch_sizes

capture_bs = lane_batch_sizes(model_runner, capture_bs, captured_req_width)
""",
    reason="Wide trees of many requests take gigabytes and never pay; a lane leaves such batches to narrower ones.",
)

_SUMMARY = "Capture the graphs of a wide tree only for as many requests as can pay and fit."
_NAMED = {"captured_req_width": "num_tokens_per_bs"}


def _renamed(example: Example) -> Example:
    old, new = next(iter(_NAMED.items()))
    return Example(before=example.before.replace(old, new), after=example.after.replace(old, new))


#: The releases of the first worker.
CUDA_GRAPH_RUNNER = Edit(
    path="srt/model_executor/cuda_graph_runner.py",
    summary=_SUMMARY,
    insertions=(LANE_SIZES.moved(LANE_SIZES.anchor, renamed=_NAMED),),
    examples=(_renamed(EXAMPLE),),
)

#: 0.5.14 and 0.5.15.
BASE_CUDA_GRAPH_RUNNER_PER_BS = Edit(
    path="srt/model_executor/runner/base_cuda_graph_runner.py",
    summary=_SUMMARY,
    insertions=CUDA_GRAPH_RUNNER.insertions,
    examples=CUDA_GRAPH_RUNNER.examples,
)

#: 0.5.16 and later.
BASE_CUDA_GRAPH_RUNNER = Edit(
    path=BASE_CUDA_GRAPH_RUNNER_PER_BS.path,
    summary=_SUMMARY,
    insertions=(LANE_SIZES,),
    examples=(EXAMPLE,),
)
