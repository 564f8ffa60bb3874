# SPDX-License-Identifier: Apache-2.0
"""srt/speculative/dflash_utils.py: a tree is verified with a mask, whatever the backend does for a chain."""

from __future__ import annotations

from ddtree_overlay.edits.anchors import After
from ddtree_overlay.edits.base import Edit, Example, insert_statements


EXAMPLE = Example(
    before="""\
def resolve_dflash_verify_mask_policy(attn_backend):
    backend_name = type(attn_backend).__name__
    return backend_name, (backend_name not in _DFLASH_VERIFY_SKIP_CUSTOM_MASK_BACKENDS)
""",
    after="""\
def resolve_dflash_verify_mask_policy(attn_backend):
    backend_name = type(attn_backend).__name__
    from sglang.srt.server_args import get_global_server_args

    if get_global_server_args().speculative_algorithm == "DDTREE":
        return backend_name, True
    return backend_name, (backend_name not in _DFLASH_VERIFY_SKIP_CUSTOM_MASK_BACKENDS)
""",
)

DFLASH_UTILS = Edit(
    path="srt/speculative/dflash_utils.py",
    summary="Capture CUDA graphs of a tree's verify step with a mask for every backend.",
    insertions=(
        insert_statements(
            "resolve_dflash_verify_mask_policy",
            After("backend_name = type(...).__name__"),
            """\
from sglang.srt.server_args import get_global_server_args

if get_global_server_args().speculative_algorithm == "DDTREE":
    return backend_name, True
""",
            reason="FlashInfer replays with a mask only if its graph was captured with one.",
        ),
    ),
    examples=(EXAMPLE,),
)
