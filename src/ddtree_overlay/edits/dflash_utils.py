# SPDX-License-Identifier: Apache-2.0
"""srt/speculative/dflash_utils.py: a tree is verified with a mask, and some requests are not for it."""

from __future__ import annotations

from ddtree_overlay.edits.anchors import After, AtStart
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
    from sglang.srt.speculative.ddtree.gates import is_ddtree_on

    if is_ddtree_on():
        return backend_name, True
    return backend_name, (backend_name not in _DFLASH_VERIFY_SKIP_CUSTOM_MASK_BACKENDS)
""",
)

ALWAYS_MASKED = insert_statements(
    "resolve_dflash_verify_mask_policy",
    After("backend_name = type(...).__name__"),
    """\
from sglang.srt.speculative.ddtree.gates import is_ddtree_on

if is_ddtree_on():
    return backend_name, True
""",
    reason="A graph that was captured without a mask, as for a chain, would verify a tree as a chain.",
)

REFUSE_REQUEST = insert_statements(
    "validate_dflash_request",
    AtStart(),
    """\
from sglang.srt.speculative.ddtree.requests import request_refusal

refusal = request_refusal(req)
if refusal is not None:
    return refusal
""",
    reason="What DFLASH serves and a tree does not is refused at admission, with the reason.",
    blank_after=1,
)

DFLASH_UTILS = Edit(
    path="srt/speculative/dflash_utils.py",
    summary="Capture CUDA graphs of a tree's verify step with a mask for every backend.",
    insertions=(ALWAYS_MASKED,),
    examples=(EXAMPLE,),
)

#: For the releases that look at a request before they admit it.
DFLASH_UTILS_SECOND = Edit(
    path=DFLASH_UTILS.path,
    summary="Capture CUDA graphs with a tree mask for every backend, and refuse requests that a tree cannot serve.",
    insertions=(ALWAYS_MASKED, REFUSE_REQUEST),
    examples=(
        Example(
            before=EXAMPLE.before
            + """

def validate_dflash_request(req, enable_overlap):
    if req.return_logprob:
        return "DFLASH speculative decoding does not support return_logprob yet."
    return None
""",
            after=EXAMPLE.after
            + """

def validate_dflash_request(req, enable_overlap):
    from sglang.srt.speculative.ddtree.requests import request_refusal

    refusal = request_refusal(req)
    if refusal is not None:
        return refusal

    if req.return_logprob:
        return "DFLASH speculative decoding does not support return_logprob yet."
    return None
""",
        ),
    ),
)
