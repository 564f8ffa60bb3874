# SPDX-License-Identifier: Apache-2.0
"""Every edit of every release against its own examples, and against the three ways in which an anchor can be wrong."""

from __future__ import annotations

import libcst as cst
import pytest

from ddtree_overlay.edits.anchors import After, AnchorError, Before, find_scope, find_spot
from ddtree_overlay.edits.base import Edit, Example, Insertion
from ddtree_overlay.edits.tree import replace_block
from ddtree_overlay.releases import KNOWN


EDITS = list(dict.fromkeys(edit for row in KNOWN for edit in row.edits))
EXAMPLES = [pytest.param(edit, example, id=edit.path) for edit in EDITS for example in edit.examples]
INSERTIONS = [
    pytest.param(edit, insertion, id=f"{edit.path}:{insertion.scope}:{number}")
    for edit in EDITS
    for number, insertion in enumerate(edit.insertions)
]


def test_every_edit_has_an_example():
    """An edit without a before/after pair is one that nobody can review."""
    assert [edit.path for edit in EDITS if not edit.examples] == []


@pytest.mark.parametrize(("edit", "example"), EXAMPLES)
def test_example_is_reproduced_byte_for_byte(edit: Edit, example: Example):
    """The edit turns `before` into exactly `after`."""
    assert edit.apply(example.before.encode()) == example.after.encode()


@pytest.mark.parametrize(("edit", "example"), EXAMPLES)
def test_second_application_changes_nothing(edit: Edit, example: Example):
    """An edit of its own output is a no-op (openrewrite/rewrite#487)."""
    assert edit.apply(example.after.encode()) == example.after.encode()


@pytest.mark.parametrize(("edit", "example"), EXAMPLES)
def test_removal_gives_the_exact_base(edit: Edit, example: Example):
    """What was inserted can be taken out without the base at hand."""
    assert edit.remove(example.after.encode()) == example.before.encode()


@pytest.mark.parametrize(("edit", "example"), EXAMPLES)
def test_result_compiles(edit: Edit, example: Example):
    """Python has the last word: libcst accepts code that does not compile."""
    compile(edit.apply(example.before.encode()), edit.path, "exec", dont_inherit=True)


@pytest.mark.parametrize(("edit", "insertion"), INSERTIONS)
def test_missing_scope_is_refused(edit: Edit, insertion: Insertion):
    """A scope that was renamed is an error that names it, not a patch somewhere else."""
    name = insertion.scope.rpartition(".")[2]
    before = (
        edit.examples[0].before.replace(f"def {name}(", f"def {name}_2(").replace(f"class {name}", f"class {name}2")
    )

    with pytest.raises(AnchorError) as caught:
        edit.apply(before.encode())

    assert edit.path in caught.value.what
    assert name in (caught.value.wanted, caught.value.wanted.removeprefix("def "))


@pytest.mark.parametrize(("edit", "insertion"), INSERTIONS)
def test_doubled_scope_is_refused(edit: Edit, insertion: Insertion):
    """Of two functions of one name the later wins, so neither is patched."""
    module = cst.parse_module(edit.examples[0].before)
    scope = find_scope(module, insertion.scope, edit.path)
    parent = insertion.scope.rpartition(".")[0]
    block = find_scope(module, parent, edit.path).body if parent else module
    doubled = replace_block(module, block, block.with_changes(body=[*block.body, scope]))

    with pytest.raises(AnchorError, match=r"defined more than once|2 places match"):
        edit.apply(doubled.bytes)


@pytest.mark.parametrize(
    ("edit", "insertion"), [p for p in INSERTIONS if isinstance(p.values[1].anchor, (After, Before))]
)
@pytest.mark.parametrize("copies", [0, 2], ids=["missing", "ambiguous"])
def test_anchor_statement_must_be_there_once(edit: Edit, insertion: Insertion, copies: int):
    """No anchor, or two of them, is a refusal that says which file, scope and statement."""
    module = cst.parse_module(edit.examples[0].before)
    spot = find_spot(module, insertion.scope, insertion.anchor, edit.path)
    at = spot.index - (0 if isinstance(insertion.anchor, Before) else 1)
    body = list(spot.block.body)
    body[at : at + 1] = [body[at]] * copies or [cst.parse_statement("pass\n")]
    changed = replace_block(module, spot.block, spot.block.with_changes(body=body))

    with pytest.raises(AnchorError) as caught:
        edit.apply(changed.bytes)

    assert caught.value.wanted == insertion.anchor.text
    assert len(caught.value.places) == 2 or copies == 0


@pytest.mark.parametrize(("edit", "example"), EXAMPLES)
def test_decoy_of_equal_body_is_left_alone(edit: Edit, example: Example):
    """The named class is edited, never its twin (landley/toybox#533, bazel-central-registry#5664)."""
    module = cst.parse_module(example.before)
    classes = [node for node in module.body if isinstance(node, cst.ClassDef)]
    decoys = [node.with_changes(name=cst.Name(f"Decoy{node.name.value}")) for node in classes]
    functions = [f for node in classes for f in node.body.body if isinstance(f, cst.FunctionDef)]
    twins = cst.Module(body=[*decoys, *functions]).code

    for before, after in (
        (twins + example.before, twins + example.after),
        (example.before + twins, example.after + twins),
    ):
        assert edit.apply(before.encode()) == after.encode()
