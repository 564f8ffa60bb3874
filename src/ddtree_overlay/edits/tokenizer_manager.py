# SPDX-License-Identifier: Apache-2.0
"""srt/managers/tokenizer_manager.py: per-request metadata that names the tree."""

from __future__ import annotations

from ddtree_overlay.edits.algorithm import register_gate
from ddtree_overlay.edits.anchors import After
from ddtree_overlay.edits.base import Edit, Example
from ddtree_overlay.edits.ddtree import DDTREE


EXAMPLE = Example(
    before="""\
class TokenizerManager:
    def _calculate_spec_decoding_metrics(self, meta_info, recv_obj, i):
        if recv_obj.spec_verify_ct[i] > 0:
            meta_info["spec_verify_ct"] = recv_obj.spec_verify_ct[i]
""",
    after="""\
class TokenizerManager:
    def _calculate_spec_decoding_metrics(self, meta_info, recv_obj, i):
        if recv_obj.spec_verify_ct[i] > 0:
            meta_info["spec_verify_ct"] = recv_obj.spec_verify_ct[i]
            if self.server_args.speculative_algorithm == "DDTREE":
                from sglang.srt.speculative.ddtree.args import request_meta_info

                meta_info.update(request_meta_info(self.server_args))
""",
)

META_INFO = register_gate(
    DDTREE,
    "args:request_meta_info",
    scope="TokenizerManager._calculate_spec_decoding_metrics",
    anchor=After('meta_info["spec_verify_ct"] = ...'),
    condition=DDTREE.chosen_in("self.server_args"),
    statement="meta_info.update({function}(self.server_args))",
    reason="An accept rate per proposed token means nothing for a tree unless the tree is named with it.",
)

TOKENIZER_MANAGER = Edit(
    path="srt/managers/tokenizer_manager.py",
    summary="Report algorithm and budget with the accept length of each request.",
    insertions=(META_INFO,),
    examples=(EXAMPLE,),
)

#: For releases whose published arguments are the ones that count.
TOKENIZER_MANAGER_PUBLISHED = Edit(
    path=TOKENIZER_MANAGER.path,
    summary=TOKENIZER_MANAGER.summary,
    insertions=(META_INFO.moved(META_INFO.anchor, renamed={"self.server_args": "get_spec()"}),),
    examples=(Example(EXAMPLE.before, EXAMPLE.after.replace("self.server_args", "get_spec()")),),
)
