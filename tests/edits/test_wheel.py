# SPDX-License-Identifier: Apache-2.0
"""The edits on the published files."""

from __future__ import annotations

import ast

import pytest
from tests.support import wheels

from ddtree_overlay.edits.anchors import After, Before
from ddtree_overlay.edits.base import Edit, insert_statements
from ddtree_overlay.releases import KNOWN, Release


CASES = [pytest.param(row, edit, id=f"{row.version}:{edit.path}") for row in KNOWN for edit in row.edits]


@pytest.mark.parametrize(("row", "edit"), CASES)
def test_published_file_round_trips(row: Release, edit: Edit):
    """Applied, applied again, removed: the second changes nothing, the third gives the published bytes.

    The lines a patched file has more than its base are the insertions' lines, no others.
    """
    base = wheels.package(row.version)[edit.path]
    declared = sum(i.code.count("\n") + i.blank_before + i.blank_after for i in edit.insertions)

    patched = edit.apply(base)

    assert patched.count(b"\n") - base.count(b"\n") == declared
    assert edit.apply(patched) == patched
    assert edit.remove(patched) == base
    compile(patched, edit.path, "exec", dont_inherit=True)


@pytest.mark.parametrize("row", KNOWN, ids=lambda row: row.version)
def test_members_that_exist_keep_their_values(row: Release):
    """DDTREE comes last in the enum of the real file."""
    edit = row.edit("srt/speculative/spec_info.py")
    base = wheels.package(row.version)[edit.path]

    assert members(edit.apply(base)) == [*members(base), "DDTREE"]


def members(source: bytes) -> list[str]:
    enum = next(n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == "SpeculativeAlgorithm")
    return [n.targets[0].id for n in enum.body if isinstance(n, ast.Assign)]


def test_moved_insertion_has_the_names_of_its_new_place():
    """A release in which code moved to a function takes the same insertion, with `self` by its new name."""
    here = insert_statements("C.f", After("a = 1"), "if self.selfish:\n    go(self)\n", reason="Test.")
    there = here.moved(Before("b = 2"), scope="f", renamed={"self": "server_args"})

    patched = Edit("srt/x.py", "Test.", (there,)).apply(b"def f(server_args):\n    a = 1\n    b = 2\n")

    assert patched == (
        b"def f(server_args):\n    a = 1\n    if server_args.selfish:\n        go(server_args)\n    b = 2\n"
    )
    assert here.moved(After("c = 3")).scope == "C.f"
