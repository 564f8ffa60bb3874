# SPDX-License-Identifier: Apache-2.0
"""Bytes in, bytes out: newline styles, BOMs, encodings, tabs and missing final newlines come through every edit."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ddtree_overlay.edits.anchors import After, AtStart, Before
from ddtree_overlay.edits.base import Edit, add_enum_member, add_field, add_method, insert_statements
from ddtree_overlay.edits.tree import parse
from ddtree_overlay.errors import OverlayError
from ddtree_overlay.releases import KNOWN


EDITS = list(dict.fromkeys(edit for row in KNOWN for edit in row.edits))
BOM = b"\xef\xbb\xbf"

EDIT = Edit(
    "srt/x.py",
    "One insertion of each kind.",
    (
        add_enum_member("E", "NEW", reason="Test."),
        add_field("C", ("x: int = 1", "y: int = 2"), after="a", reason="Test."),
        add_method("C", "def new(self):\n    # why\n    return (\n        1\n    )\n", after="f", reason="Test."),
        insert_statements("C.f", AtStart(), "if new:\n    import n\n\n    n()\n", reason="Test.", blank_after=1),
        insert_statements("C.f", Before("last = 2"), "# note\nm = 1\n\nm += 1\n", reason="Test.", blank_before=2),
        insert_statements("C.f", After("last = 2"), "end()\n", reason="Test."),
    ),
)

LINES = [
    "class E(Enum):", "    A = auto()", "    B = auto()", "",
    "class C:", "    a: int = 0", "    def f(self):", "        first = 1", "        if first:", "            pass",
    "        last = 2",
]  # fmt: skip
NOISE = st.sampled_from(["", "   ", "# low", "    # four", "        # eight", "            # twelve", "\x0c"])


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """The lines with blank lines and comments of any depth between them, in any style a Python file may have."""
    lines = []
    for line in LINES:
        lines += [*draw(st.lists(NOISE, max_size=2)), line]
    lines += draw(st.lists(NOISE, max_size=2))
    if draw(st.booleans()):
        lines = [line.replace("    ", "\t") for line in lines]
    newline = draw(st.sampled_from(["\n", "\r\n", "\r"]))
    text = newline.join(lines) + draw(st.sampled_from(["", newline]))
    return draw(st.sampled_from([b"", BOM])) + text.encode()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(files())
def test_round_trip_is_exact_in_every_style(data: bytes):
    """What is not refused is applied once, survives in every line, and comes apart exactly (bump-pydantic#169)."""
    compile(data, "x.py", "exec", dont_inherit=True)

    try:
        patched = EDIT.apply(data)
    except OverlayError:
        assume(False)

    assert EDIT.apply(patched) == patched
    assert EDIT.remove(patched) == data
    compile(patched, "x.py", "exec", dont_inherit=True)
    rest = iter(_lines(patched))
    assert all(any(line == other for other in rest) for line in _lines(data))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([b"a = 1", b"", b"# c", b"if a:\n    b"]), max_size=6), st.data())
def test_mixed_newlines_are_exact_or_refused(lines: list[bytes], data: st.DataObject):
    """A file whose newlines cannot be kept is refused, never rewritten (LibCST#901)."""
    source = b"".join(line + data.draw(st.sampled_from([b"\n", b"\r\n", b"\r"])) for line in lines)

    try:
        module = parse(source, "x.py")
    except OverlayError:
        return
    assert module.bytes == source


@pytest.mark.parametrize("edit", EDITS, ids=lambda e: e.path)
@pytest.mark.parametrize("newline", ["\n", "\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize("bom", [b"", BOM], ids=["plain", "bom"])
@pytest.mark.parametrize("final", [True, False], ids=["newline", "no-newline"])
def test_examples_follow_the_style_of_the_file(edit: Edit, newline: str, bom: bytes, final: bool):
    """Inserted lines end as the file's own lines do."""
    example = edit.examples[0]
    before, after = (_styled(text, newline, bom, final) for text in (example.before, example.after))

    assert edit.apply(before) == after
    assert edit.remove(after) == before


def test_latin_1_file_keeps_its_encoding():
    """Inserted code is ASCII, so it fits every encoding Python can read."""
    cookie = "# -*- coding: latin-1 -*-\n"
    data = (cookie + "\n".join(LINES) + "\n        last.name = 'é'\n").encode("latin-1")

    patched = EDIT.apply(data)

    assert "é".encode("latin-1") in patched
    assert EDIT.remove(patched) == data


def _styled(text: str, newline: str, bom: bytes, final: bool) -> bytes:
    return bom + (text if final else text.rstrip("\n")).replace("\n", newline).encode()


def _lines(data: bytes) -> list[bytes]:
    return data.removeprefix(BOM).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
