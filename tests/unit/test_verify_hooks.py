# SPDX-License-Identifier: Apache-2.0
"""A hook that is not where it must be, or does not reach what it needs, is found by the check `hooks`."""

from __future__ import annotations

import ast
import dataclasses

import pytest
from tests.support import small
from tests.support.planted import SERVER_ARGS, WORKER, Tree, edited

from ddtree_overlay.verify.hooks import check_hooks


HOOK = """\
        if str(self.speculative_algorithm).upper() == "DDTREE":
            from sglang.srt.speculative.ddtree.args import choose_attention_backend

            choose_attention_backend(self)

"""


def test_deleted_hook_is_found():
    """By the check that looks for it, and because the file no longer comes apart."""
    tree = Tree()
    patched = edited(tree.patched(), SERVER_ARGS, HOOK, "")

    found = tree.errors(patched)

    assert {f.check for f in found} == {"hooks", "structure"}
    assert any("is there 0 times" in f.message for f in found)


def test_doubled_hook_is_found():
    """Twice is not once."""
    tree = Tree()
    patched = edited(tree.patched(), SERVER_ARGS, HOOK, HOOK + HOOK)

    found = tree.errors(patched)

    assert {f.check for f in found} == {"hooks", "structure"}
    assert any("is there 2 times" in f.message and f.line for f in found)


def test_hook_in_another_scope_is_found():
    """A hook that wandered is not in place (landley/toybox#533)."""
    tree = Tree()
    patched = edited(tree.patched(), SERVER_ARGS, HOOK, "")
    head = "    @staticmethod\n    def add_cli_args"
    patched = edited(patched, SERVER_ARGS, head, f"    def other(self):\n{HOOK}{head}")

    assert any("stands in ServerArgs.other instead" in f.message for f in tree.errors(patched))


@pytest.mark.parametrize(
    "dead",
    [
        "        return self\n",
        "        raise ValueError\n",
        "        if self:\n            return 1\n        else:\n            return 2\n",
    ],
)
def test_unreachable_hook_is_found(dead: str):
    """A release that returns early in front of the anchor leaves the hook in place and dead."""
    anchor = '        if self.speculative_algorithm == "DFLASH":\n            self.speculative_num_draft_tokens = 16\n'
    tree = Tree().change(SERVER_ARGS, anchor, dead + anchor)

    found = tree.errors()

    assert {f.check for f in found} == {"hooks"}
    assert sum("is never reached" in f.message for f in found) == 2


def test_hook_whose_names_are_gone_is_found():
    """A local variable that was renamed upstream breaks the hook at run time only."""
    tree = Tree().change(WORKER, "block_ids", "ids")

    (found,) = tree.errors()

    assert found.check == "hooks"
    assert "uses block_ids, which nothing before it defines" in found.message


def test_hook_in_front_of_its_names_is_found():
    """Defined later is not defined."""
    line = "        lm_head = wrap(batch)\n"
    tree = (
        Tree().change(WORKER, line, "").change(WORKER, "        return draft_next", f"{line}        return draft_next")
    )

    assert [f.check for f in tree.errors()] == ["hooks"]


def test_names_of_an_inserted_method_are_looked_for():
    """An annotation that the file does not import (`NoReturn`) would be noticed when it is imported."""
    edit = next(edit for edit in small.RELEASE.edits if edit.path == "srt/speculative/spec_info.py")
    methods = [i for i in edit.insertions if "def is_ddtree" in i.code]
    (method,) = methods
    blind = dataclasses.replace(method, code=method.code.replace("-> bool:", "-> NoReturn:"))
    changed = dataclasses.replace(edit, insertions=tuple(blind if i is method else i for i in edit.insertions))
    text = (
        Tree()
        .patched()
        .files[edit.path]
        .decode()
        .replace("def is_ddtree(self) -> bool", "def is_ddtree(self) -> NoReturn")
    )

    (found,) = check_hooks(changed, ast.parse(text))

    assert "uses NoReturn, which nothing before it defines" in found.message
