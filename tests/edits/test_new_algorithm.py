# SPDX-License-Identifier: Apache-2.0
"""A second algorithm registers with the same named pieces, beside DDTREE, and each can be taken out on its own."""

from __future__ import annotations

from ddtree_overlay.edits.anchors import Before
from ddtree_overlay.edits.base import Edit, add_enum_member, add_method, insert_statements
from ddtree_overlay.edits.spec_info import EXAMPLE, SPEC_INFO


TOY = Edit(
    path=SPEC_INFO.path,
    summary="Register TOY.",
    insertions=(
        add_enum_member("SpeculativeAlgorithm", "TOY", reason="Its name."),
        add_method(
            "SpeculativeAlgorithm",
            "def is_toy(self) -> bool:\n    return self == SpeculativeAlgorithm.TOY\n",
            after="is_ngram",
            reason="Its predicate.",
        ),
        insert_statements(
            "SpeculativeAlgorithm.create_worker",
            Before("if self.is_dflash(): ..."),
            'if self.is_toy():\n    return "ToyWorker"\n',
            reason="Its worker.",
            blank_before=1,
        ),
    ),
)


def test_two_algorithms_share_a_file():
    """Both are members, and existing members keep their values."""
    patched = TOY.apply(SPEC_INFO.apply(EXAMPLE.before.encode()))

    names: dict[str, object] = {}
    exec(compile(patched, "spec_info.py", "exec"), names)
    algorithm = names["SpeculativeAlgorithm"]
    assert [(m.name, m.value) for m in algorithm] == [("DFLASH", 1), ("NONE", 2), ("DDTREE", 3), ("TOY", 4)]
    assert algorithm.DDTREE.is_dflash()
    assert not algorithm.TOY.is_dflash()


def test_algorithms_come_off_in_reverse_order():
    """The last one on is the first one off; each removal is exact."""
    ddtree = SPEC_INFO.apply(EXAMPLE.before.encode())
    both = TOY.apply(ddtree)

    assert TOY.remove(both) == ddtree
    assert SPEC_INFO.remove(TOY.remove(both)) == EXAMPLE.before.encode()
