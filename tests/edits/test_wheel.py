# SPDX-License-Identifier: Apache-2.0
"""The edits on the published files."""

from __future__ import annotations

import ast

import pytest
from tests.support import wheels

from ddtree_overlay.edits.base import Edit
from ddtree_overlay.releases import RELEASES, Release


CASES = [pytest.param(row, edit, id=f"{row.version}:{edit.path}") for row in RELEASES for edit in row.edits]


@pytest.mark.parametrize(("row", "edit"), CASES)
def test_published_file_round_trips(row: Release, edit: Edit):
    """Applied, applied again, removed: the second changes nothing, the third gives the published bytes."""
    base = wheels.package(row.version)[edit.path]

    patched = edit.apply(base)

    assert patched != base
    assert edit.apply(patched) == patched
    assert edit.remove(patched) == base
    compile(patched, edit.path, "exec", dont_inherit=True)


@pytest.mark.parametrize(("row", "edit"), CASES)
def test_inserted_code_is_exactly_the_declared_code(row: Release, edit: Edit):
    """The lines a patched file has more than its base are the insertions' lines, no others."""
    base = wheels.package(row.version)[edit.path]
    declared = sum(i.code.count("\n") + i.blank_before + i.blank_after for i in edit.insertions)

    assert edit.apply(base).count(b"\n") - base.count(b"\n") == declared


def test_members_that_exist_keep_their_values():
    """DDTREE comes last in the enum of the real file."""
    edit = next(e for e in RELEASES[0].edits if e.path.endswith("spec_info.py"))
    tree = ast.parse(edit.apply(wheels.package()[edit.path]))
    enum = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "SpeculativeAlgorithm")

    members = [n.targets[0].id for n in enum.body if isinstance(n, ast.Assign)]

    assert members[-1] == "DDTREE"
    assert len(members) == 7
