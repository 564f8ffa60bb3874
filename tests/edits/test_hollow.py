# SPDX-License-Identifier: Apache-2.0
"""Files without the bodies that an edit does not look at, and with them again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support import wheels

from ddtree_overlay.edits.anchors import After, AnchorError
from ddtree_overlay.edits.base import Edit, insert_statements
from ddtree_overlay.edits.hollow import hollow
from ddtree_overlay.edits.tree import parse
from ddtree_overlay.releases import KNOWN, Release


SOURCE = '''\
"""Doc."""
import os


class A:
    """Of A."""

    x = 1

    @decorated(
        1,
    )
    def f(self, a=lambda: (
        1
    )) -> "int":  # a comment
        # a comment above the body
        """Doc."""
        if a:
            return 1

            # deeper, behind the body
        return f"""
not a statement:
    pass
"""
        # behind the body

    def one(self): return 1

    async def g(self):
        def inner():
            pass

        @decorated
        class C:
            def f(self):
                pass
        await inner()  # last

    class B:
        def f(self): pass; x = 2
        def h(self):
            x = 1; \\
            y = 2


def f(a, b):
    return a


if os.name:
    def f(b):
        return b
'''
STYLES = [
    pytest.param(lambda s: s, id="lf"),
    pytest.param(lambda s: s.replace("\n", "\r\n"), id="crlf"),
    pytest.param(lambda s: s.replace("\n", "\r"), id="cr"),
    pytest.param(lambda s: s.replace("    ", "\t"), id="tabs"),
    pytest.param(lambda s: "\ufeff" + s, id="bom"),
    pytest.param(lambda s: s.rstrip("\n"), id="no-newline"),
    pytest.param(lambda s: s.replace("# behind", "\x0c# left out 0, behind"), id="form-feed-and-mark"),
]


@pytest.mark.parametrize("style", STYLES)
def test_bodies_come_back_byte_for_byte(style):
    """Whatever the newlines, the indentation and the comments between."""
    data = style(SOURCE).encode()

    part, filled = hollow(data, ())

    assert filled(part) == data
    assert b"deeper" not in part
    assert b"await inner" not in part
    assert all(line in part for line in (b"def one(self): return 1", b"class B:", b"x = 1", b'"""Of A."""'))
    compile(part, "part", "exec", dont_inherit=True)


def test_what_is_named_stays():
    """The scope itself, what it lies in, and nothing of the same name elsewhere."""
    part, _ = hollow(SOURCE.encode(), ("A.g.C.f",))
    assert b"await inner" in part
    assert b"return a\n" not in part

    part, _ = hollow(SOURCE.encode(), ("f",))
    assert b"return a\n" in part
    assert b"deeper" not in part


names = st.sampled_from(["f", "g", "h"])
statements = st.recursive(
    st.sampled_from(["pass", "x = 1  # why", "s = '''\n  def f():\n'''", "# lone\nreturn", "'doc'"]),
    lambda inner: st.builds(
        lambda head, lines: head + "\n" + "\n".join("    " + line for text in lines for line in text.split("\n")),
        st.one_of(st.builds("def {}(a,\n b=1):".format, names), st.just("if x:"), st.builds("class {}:".format, names)),
        st.lists(inner.filter(lambda text: "'''" not in text), min_size=1, max_size=3),
    ),
    max_leaves=12,
)


@given(st.lists(statements, max_size=4), st.sets(st.sampled_from(["f", "g.f", "h.g", "f.g.h"])))
def test_any_file_comes_back(parts, scopes):
    """Functions, classes and branches nested in any way."""
    data = ("\n".join(parts) + "\n").encode()
    try:
        compile(data, "data", "exec", dont_inherit=True, flags=0x400)  # ast only: `return` may stand anywhere
    except SyntaxError:
        return

    part, filled = hollow(data, scopes)

    assert filled(part) == data


@pytest.mark.parametrize("row", KNOWN[::6], ids=lambda row: row.version)
def test_edits_give_what_they_give_without_it(row: Release):
    """On every published file, what is made of the part is what is made of the whole."""
    for edit in row.edits:
        base = wheels.package(row.version)[edit.path]
        module, missing = edit._without(parse(base, edit.path))
        for insertion in edit.insertions:
            module = insertion.insert(module, edit.path)

        assert missing == list(edit.insertions)
        assert edit.apply(base) == module.bytes


def test_refusal_names_the_line_of_the_whole_file():
    """A message about line 3 of a file that nobody has would help nobody."""
    source = "def f():\n    a = 1\n    b = 2\n    c = 3\n\n\ndef g():\n    x = 1\n    x = 1\n"
    edit = Edit("srt/x.py", "Test.", (insert_statements("g", After("x = 1"), "y = 2\n", reason="Test."),))

    with pytest.raises(AnchorError) as caught:
        edit.apply(source.encode())

    assert [line for line, _ in caught.value.places] == [8, 9]
