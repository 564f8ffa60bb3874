# SPDX-License-Identifier: Apache-2.0
"""srt/speculative/spec_info.py: DDTREE becomes a speculative algorithm of its own."""

from __future__ import annotations

from ddtree_overlay.edits.algorithm import register_member, register_worker
from ddtree_overlay.edits.base import Edit, Example
from ddtree_overlay.edits.ddtree import DDTREE


EXAMPLE = Example(
    before='''\
from enum import Enum, auto


class SpeculativeAlgorithm(Enum):
    """Algorithms."""

    DFLASH = auto()
    NONE = auto()

    def is_dflash(self) -> bool:
        return self == SpeculativeAlgorithm.DFLASH

    def is_ngram(self) -> bool:
        return False

    def create_worker(self, server_args):
        enable_overlap = not server_args.disable_overlap_schedule

        if self.is_dflash():
            return "DFlashWorker"
''',
    after='''\
from enum import Enum, auto


class SpeculativeAlgorithm(Enum):
    """Algorithms."""

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

    def is_ngram(self) -> bool:
        return False

    def create_worker(self, server_args):
        enable_overlap = not server_args.disable_overlap_schedule

        if self.is_ddtree():
            from sglang.srt.speculative.ddtree.worker import create_ddtree_worker

            return create_ddtree_worker(enable_overlap)

        if self.is_dflash():
            return "DFlashWorker"
''',
)

MEMBER, COUNT_AS_DFLASH, PREDICATE = register_member(
    DDTREE, why="drafts with the DFlash model: every DFlash branch applies."
)

WORKER = register_worker(
    DDTREE,
    "worker:create_ddtree_worker",
    arguments="enable_overlap",
    reason="The tree worker must be chosen before the DFLASH branch, which DDTREE also satisfies.",
)

SUMMARY = "Register DDTREE as a speculative algorithm that counts as DFLASH wherever DFLASH is asked for."

SPEC_INFO = Edit(
    path="srt/speculative/spec_info.py",
    summary=SUMMARY,
    insertions=(MEMBER, COUNT_AS_DFLASH, PREDICATE, WORKER),
    examples=(EXAMPLE,),
)
