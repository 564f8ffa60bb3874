# SPDX-License-Identifier: Apache-2.0
"""srt/managers/tokenizer_manager.py: per-request metadata that names the tree."""

from __future__ import annotations

from ddtree_overlay.edits.algorithm import register_gate
from ddtree_overlay.edits.anchors import After, AtStart
from ddtree_overlay.edits.base import Edit, Example
from ddtree_overlay.edits.ddtree import DDTREE


EXAMPLE = Example(
    before="""\
class TokenizerManager:
    def _calculate_spec_decoding_metrics(self, meta_info, recv_obj, i):
        if recv_obj.spec_verify_ct[i] > 0:
            meta_info["spec_verify_ct"] = recv_obj.spec_verify_ct[i]

    def _validate_one_request(self, obj, input_ids):
        "Validates the length."
        _max_req_len = self.context_len
""",
    after="""\
class TokenizerManager:
    def _calculate_spec_decoding_metrics(self, meta_info, recv_obj, i):
        if recv_obj.spec_verify_ct[i] > 0:
            meta_info["spec_verify_ct"] = recv_obj.spec_verify_ct[i]
            if self.server_args.speculative_algorithm == "DDTREE":
                from sglang.srt.speculative.ddtree.args import request_meta_info

                meta_info.update(request_meta_info(self.server_args))

    def _validate_one_request(self, obj, input_ids):
        "Validates the length."
        if self.server_args.speculative_algorithm == "DDTREE":
            from sglang.srt.speculative.ddtree.choosing import check_wish

            check_wish(self.server_args, obj)
        _max_req_len = self.context_len
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

CHECK_WISH = register_gate(
    DDTREE,
    "choosing:check_wish",
    scope="TokenizerManager._validate_one_request",
    anchor=AtStart(),
    condition=DDTREE.chosen_in("self.server_args"),
    statement="{function}(self.server_args, obj)",
    reason="A request that asks for a budget which the server did not build must hear so instead of being served with "
    "another one.",
)

TOKENIZER_MANAGER = Edit(
    path="srt/managers/tokenizer_manager.py",
    summary="Report algorithm and budgets with a request's accept length; refuse one that asks for another budget.",
    insertions=(META_INFO, CHECK_WISH),
    examples=(EXAMPLE,),
)

#: For releases whose published arguments are the ones that count.
TOKENIZER_MANAGER_PUBLISHED = Edit(
    path=TOKENIZER_MANAGER.path,
    summary=TOKENIZER_MANAGER.summary,
    insertions=tuple(
        piece.moved(piece.anchor, renamed={"self.server_args": "get_spec()"}) for piece in (META_INFO, CHECK_WISH)
    ),
    examples=(Example(EXAMPLE.before, EXAMPLE.after.replace("self.server_args", "get_spec()")),),
)
