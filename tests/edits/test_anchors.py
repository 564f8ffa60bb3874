# SPDX-License-Identifier: Apache-2.0
"""What a refusal says, and which statements a pattern means."""

from __future__ import annotations

import pytest

from ddtree_overlay.edits.anchors import After, AnchorError, AtStart, Before
from ddtree_overlay.edits.base import Edit, insert_statements
from ddtree_overlay.errors import OverlayError


def edit(anchor, scope="C.f", **kwargs) -> Edit:
    return Edit("srt/x.py", "Test.", (insert_statements(scope, anchor, "new()\n", reason="Test.", **kwargs),))


def body(*lines: str) -> bytes:
    return ("class C:\n    def f(self):\n" + "".join(f"        {line}\n" for line in lines)).encode()


def test_missing_anchor_names_the_nearest_candidates():
    """Who ports the edit sees file, line and text of what looks most like the anchor."""
    with pytest.raises(AnchorError) as caught:
        edit(After("tokens = server_args.num_draft_tokens")).apply(body("a = 1", "tokens = server_args.draft_tokens"))

    assert caught.value.what == ("srt/x.py:4: anchor is missing: `tokens = server_args.num_draft_tokens` in C.f")
    assert caught.value.places == ((4, "tokens = server_args.draft_tokens"),)


def test_ambiguous_anchor_names_every_place():
    """All lines that match are listed."""
    with pytest.raises(AnchorError) as caught:
        edit(After("a = 1")).apply(body("a = 1", "if x:", "    a = 1", "b = 2", "a = 1"))

    assert [line for line, _ in caught.value.places] == [3, 5, 7]
    assert "3 places match" in caught.value.what


def test_missing_scope_names_the_nearest_scopes():
    """A renamed function is offered as the candidate."""
    with pytest.raises(AnchorError) as caught:
        edit(After("a = 1"), scope="C.prepare_for_decode").apply(
            b"class C:\n    def prepare_for_decoding(self):\n        a = 1\n"
        )

    assert caught.value.places == ((2, "def prepare_for_decoding(self): ..."),)


def test_refusal_is_exit_code_one_with_a_next_step():
    """A drifted anchor never ends in exit code 0 (patch-package#143)."""
    with pytest.raises(OverlayError) as caught:
        edit(After("a = 1")).apply(body("b = 2"))

    assert caught.value.exit_code == 1
    assert caught.value.next_step


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        ("x = f(...)", "x = f(1, *a, k=2)"),
        ("x = f(...)", "x = f()"),
        ("x = ...", "x = {1: 2}[1] + 3"),
        ('add("--flag", ...)', "add('--flag', type=int)"),
        ('d["k"] = ...', "d['k']=1 # comment"),
        ("x += a.b", "x  +=  a.b"),
        ("x: ... = ...", "x: Optional[int] = None"),
    ],
)
def test_pattern_means_code_not_layout(pattern: str, line: str):
    """`...` stands for anything; blanks, comments and quotes never matter."""
    assert b"new()" in edit(After(pattern)).apply(body(line))


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        ("x = f(...)", "x = g(1)"),
        ("x = f(...)", "y = f(1)"),
        ('add("--flag", ...)', 'add("--other", type=int)'),
        ("x += a.b", "x -= a.b"),
        ("x = 1", "x = 1; y = 2"),
        ("x = 1", "x = y = 1"),
        ("x = 1", "x: int = 1"),
    ],
)
def test_pattern_refuses_what_is_only_similar(pattern: str, line: str):
    """There is no fuzz."""
    with pytest.raises(AnchorError):
        edit(After(pattern)).apply(body(line))


def test_if_pattern_takes_any_body_and_any_else():
    """`if x: ...` is about the condition."""
    source = body("if x:", "    a()", "elif y:", "    b()", "c()")

    assert edit(After("if x: ...")).apply(source) == body("if x:", "    a()", "elif y:", "    b()", "new()", "c()")


def test_body_on_the_line_of_its_header_is_refused():
    """Nothing can be inserted into `if x: y` without rewriting the line."""
    with pytest.raises(AnchorError):
        edit(After("a = 1")).apply(b"class C:\n    def f(self):\n        if x: a = 1\n")
    with pytest.raises(AnchorError):
        edit(AtStart()).apply(b"class C:\n    def f(self): a = 1\n")


def test_nested_function_is_another_scope():
    """A statement of an inner function is not one of the outer."""
    with pytest.raises(AnchorError):
        edit(After("a = 1")).apply(body("def g():", "    a = 1"))


def test_start_of_a_body_is_below_its_docstring():
    """A docstring stays the first statement."""
    assert edit(AtStart()).apply(body('"""Doc."""', "a = 1")) == body('"""Doc."""', "new()", "a = 1")


def test_comment_above_the_anchor_stays_with_it():
    """Code inserted before a statement goes above that statement's comment."""
    assert edit(Before("a = 1"), blank_before=1).apply(body("b = 1", "# why", "a = 1")) == (
        body("b = 1") + b"\n" + b"        new()\n        # why\n        a = 1\n"
    )


def test_blank_below_needs_a_statement_below():
    """Blank lines at the end of a body would belong to nobody, so the edit refuses."""
    with pytest.raises(AnchorError, match="no statement follows"):
        edit(After("a = 1"), blank_after=1).apply(body("a = 1"))


@pytest.mark.parametrize("change", [b"new( )", b"other()", b"new()  # touched", b""])
def test_changed_insertion_is_not_removed(change: bytes):
    """Unpatching refuses when the inserted code was touched by hand."""
    patched = edit(After("a = 1")).apply(body("a = 1", "b = 2"))

    with pytest.raises(AnchorError, match="missing or changed"):
        edit(After("a = 1")).remove(patched.replace(b"new()", change))


def test_broken_file_is_refused_by_name():
    """A file that does not parse is a refusal, not a traceback (LibCST#901)."""
    with pytest.raises(OverlayError, match=r"srt/x\.py: cannot be parsed"):
        edit(AtStart()).apply(b"class C:\n  def f(:\n")
