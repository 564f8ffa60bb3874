# SPDX-License-Identifier: Apache-2.0
"""srt/speculative/spec_info.py in the releases of the second worker, whose draft and target may differ in width."""

from __future__ import annotations

from dataclasses import replace

from ddtree_overlay.edits.algorithm import register_gate, register_worker
from ddtree_overlay.edits.anchors import AtStart, Before
from ddtree_overlay.edits.base import Edit, Example
from ddtree_overlay.edits.ddtree import DDTREE
from ddtree_overlay.edits.spec_info import COUNT_AS_DFLASH, MEMBER, PREDICATE, SPEC_INFO, WORKER


#: The second worker runs with and without overlap scheduling: there is nothing to ask.
WORKER_SECOND = register_worker(DDTREE, "worker:create_ddtree_worker", reason=WORKER.reason)

DRAFT_WIDTH = register_gate(
    DDTREE,
    "args:draft_width",
    scope="SpeculativeAlgorithm.get_num_tokens_per_req_for_target_verify",
    anchor=AtStart(),
    condition=f"self.{DDTREE.predicate}() and is_draft_worker",
    statement="return {function}()",
    reason="The draft runs a block a request, the target a tree; SGLang asks here for the width of either.",
)

_BEFORE = """\
from enum import Enum, auto


class SpeculativeAlgorithm(Enum):
    DFLASH = auto()
    NONE = auto()

    def is_dflash(self) -> bool:
        return self == SpeculativeAlgorithm.DFLASH

    def get_num_tokens_per_req_for_target_verify(
        self, num_draft_tokens: int, is_draft_worker: bool
    ) -> int:
        return num_draft_tokens

    def create_worker(self, server_args):
        assert not self.is_none()

        if self.is_dflash():
            return "DFlashWorkerV2"
"""

_AFTER = """\
from enum import Enum, auto


class SpeculativeAlgorithm(Enum):
    DFLASH = auto()
    NONE = auto()
    DDTREE = auto()

    def is_dflash(self) -> bool:
        # DDTREE drafts with the DFlash model: every DFlash branch applies.
        if self.is_ddtree():
            return True
        return self == SpeculativeAlgorithm.DFLASH

    def is_ddtree(self) -> bool:
        return self == SpeculativeAlgorithm.DDTREE

    def get_num_tokens_per_req_for_target_verify(
        self, num_draft_tokens: int, is_draft_worker: bool
    ) -> int:
        if self.is_ddtree() and is_draft_worker:
            from sglang.srt.speculative.ddtree.args import draft_width

            return draft_width()
        return num_draft_tokens

    def create_worker(self, server_args):
        assert not self.is_none()

        if self.is_ddtree():
            from sglang.srt.speculative.ddtree.worker import create_ddtree_worker

            return create_ddtree_worker()

        if self.is_dflash():
            return "DFlashWorkerV2"
"""

_BEFORE_HOOK = (
    _BEFORE
    + """
    def resolve_max_speculative_num_draft_tokens(self, server_args):
        cfg = resolving_view(server_args)
        if not cfg.speculative_adaptive:
            return cfg.speculative_num_draft_tokens
        return 8
"""
)

_AFTER_HOOK = (
    _AFTER
    + """
    def resolve_max_speculative_num_draft_tokens(self, server_args):
        cfg = resolving_view(server_args)
        if self.is_ddtree():
            from sglang.srt.speculative.ddtree.args import largest_width

            return largest_width(cfg)
        if not cfg.speculative_adaptive:
            return cfg.speculative_num_draft_tokens
        return 8
"""
)

#: The name of the hook for the width in 0.5.14 and 0.5.15.
_OLD_NAME = "get_num_tokens_per_bs_for_target_verify"

LARGEST_WIDTH = register_gate(
    DDTREE,
    "args:largest_width",
    scope="SpeculativeAlgorithm.resolve_max_speculative_num_draft_tokens",
    anchor=Before("if not cfg.speculative_adaptive: ..."),
    condition=f"self.{DDTREE.predicate}()",
    statement="return {function}(cfg)",
    reason="Rows, reserves and buffers are sized by this; a step writes a draft block or a tree, whichever is wider.",
)

_REGISTERED = (MEMBER, COUNT_AS_DFLASH, PREDICATE)

SPEC_INFO_PER_BS = Edit(
    path=SPEC_INFO.path,
    summary=SPEC_INFO.summary,
    insertions=(*_REGISTERED, replace(DRAFT_WIDTH, scope=f"SpeculativeAlgorithm.{_OLD_NAME}"), WORKER_SECOND),
    examples=(
        Example(
            _BEFORE.replace("get_num_tokens_per_req_for_target_verify", _OLD_NAME),
            _AFTER.replace("get_num_tokens_per_req_for_target_verify", _OLD_NAME),
        ),
    ),
)

#: 0.5.16 to 0.5.18.
SPEC_INFO_PER_REQUEST = Edit(
    path=SPEC_INFO.path,
    summary=SPEC_INFO.summary,
    insertions=(*_REGISTERED, DRAFT_WIDTH, WORKER_SECOND),
    examples=(Example(_BEFORE, _AFTER),),
)

#: 0.5.19 and later: the algorithm is also asked for the largest width.
SPEC_INFO_SIZED = Edit(
    path=SPEC_INFO.path,
    summary=SPEC_INFO.summary,
    insertions=(*_REGISTERED, DRAFT_WIDTH, LARGEST_WIDTH, WORKER_SECOND),
    examples=(Example(_BEFORE_HOOK, _AFTER_HOOK),),
)
