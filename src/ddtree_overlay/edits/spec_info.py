# SPDX-License-Identifier: Apache-2.0
"""srt/speculative/spec_info.py: DDTREE becomes a speculative algorithm of its own."""

from __future__ import annotations

from ddtree_overlay.edits.anchors import AtStart, Before
from ddtree_overlay.edits.base import Edit, Example, add_enum_member, add_method, insert_statements


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

MEMBER = add_enum_member(
    "SpeculativeAlgorithm",
    "DDTREE",
    reason="`from_string` finds an algorithm by the name of its member.",
)

COUNT_AS_DFLASH = insert_statements(
    "SpeculativeAlgorithm.is_dflash",
    AtStart(),
    """\
# DDTREE drafts with the DFlash model: every DFlash branch applies.
if self.is_ddtree():
    return True
""",
    reason="Draft model set-up, aux hidden states, graphs and admission must treat DDTREE as DFLASH.",
)

PREDICATE = add_method(
    "SpeculativeAlgorithm",
    """\
def is_ddtree(self) -> bool:
    return self == SpeculativeAlgorithm.DDTREE
""",
    after="is_dflash",
    reason="The places that differ from DFLASH ask for DDTREE by this name.",
)

WORKER = insert_statements(
    "SpeculativeAlgorithm.create_worker",
    Before("if self.is_dflash(): ..."),
    """\
if self.is_ddtree():
    from sglang.srt.speculative.ddtree.worker import create_ddtree_worker

    return create_ddtree_worker(enable_overlap)
""",
    reason="The tree worker must be chosen before the DFLASH branch, which DDTREE also satisfies.",
    blank_before=1,
)

SUMMARY = "Register DDTREE as a speculative algorithm that counts as DFLASH wherever DFLASH is asked for."

SPEC_INFO = Edit(
    path="srt/speculative/spec_info.py",
    summary=SUMMARY,
    insertions=(MEMBER, COUNT_AS_DFLASH, PREDICATE, WORKER),
    examples=(EXAMPLE,),
)
