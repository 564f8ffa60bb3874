# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import pytest
import unidiff
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ddtree_overlay.diffs import count_inserted, first_lost, split_lines, unified


TEXTS = st.lists(
    st.sampled_from([b"a", b"b", b"", b"\r", b"c\rd", b"\\ x", b"-a", b"+b", b"\xff", b"\x0c"]), max_size=8
).map(b"\n".join)


def git_apply(folder: Path, diff: bytes, *options: str) -> None:
    """Apply as a user would; the ceiling keeps git from taking a repository above for the tree it works on."""
    environ = {
        "PATH": "/usr/bin:/bin:/usr/local/bin",
        "GIT_CEILING_DIRECTORIES": str(folder.parent),
        "HOME": str(folder),
    }
    command = ["git", "apply", "--whitespace=nowarn", *options, "-"]
    subprocess.run(command, input=diff, cwd=folder, env=environ, check=True, capture_output=True, timeout=200)


@settings(max_examples=80, deadline=None)
@given(TEXTS, TEXTS, st.sampled_from([0, 1, 3]))
@example(b"a\na", b"a\n", 0)
@example(b"b\na\na", b"c\na\n", 0)
@example(b"a", b"", 0)
def test_git_turns_before_into_after(before: bytes, after: bytes, context: int):
    r"""Whatever the bytes: no final newline, lone `\r`, no UTF-8 (the hole of difflib.unified_diff)."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "tree")
        folder.mkdir()
        (folder / "f.py").write_bytes(before)
        diff = unified("f.py", before, after, context=context)
        if diff:
            git_apply(folder, diff, *(["--unidiff-zero"] if context == 0 else []))

        assert (folder / "f.py").read_bytes() == after


@pytest.mark.parametrize("text", [b"a\nb\n", b"a\nb", b"\n"])
def test_new_and_removed_files_round_trip(tmp_path: Path, text: bytes):
    """A file that appears, then goes away."""
    (tmp_path / "tree").mkdir()

    git_apply(tmp_path / "tree", unified("d/f.py", None, text))
    assert (tmp_path / "tree/d/f.py").read_bytes() == text

    git_apply(tmp_path / "tree", unified("d/f.py", text, None))
    assert not (tmp_path / "tree/d/f.py").exists()


def test_equal_files_have_no_diff():
    """No header without a change."""
    assert unified("f.py", b"a\n", b"a\n") == b""


def test_missing_final_newline_is_marked():
    """Both sides say it where it holds."""
    assert unified("f", b"a", b"a\nb", context=0) == (
        b"diff --git a/f b/f\n--- a/f\n+++ b/f\n@@ -1 +1,2 @@\n"
        b"-a\n\\ No newline at end of file\n+a\n+b\n\\ No newline at end of file\n"
    )


def test_pure_insertion_without_context_holds_no_line_of_the_file():
    """A review patch shows our lines only."""
    diff = unified("f", b"secret 1\nsecret 2\n", b"secret 1\nours\nsecret 2\n", context=0)

    assert b"secret" not in diff
    assert b"@@ -1,0 +2 @@\n+ours\n" in diff


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(["a", "b", "c"]), max_size=8), st.lists(st.sampled_from(["a", "b", "c"]), max_size=8))
def test_an_independent_reader_counts_the_same(before: list[str], after: list[str]):
    """`unidiff` parses every diff and agrees on the lines."""
    old, new = ("".join(f"{line}\n" for line in lines).encode() for lines in (before, after))
    patch = unidiff.PatchSet(unified("f.py", old, new).decode())

    assert len(patch) == (old != new)
    assert sum(f.added - f.removed for f in patch) == len(after) - len(before)


def test_lines_are_cut_at_newlines_only():
    r"""`bytes.splitlines` cuts at a lone `\r`, which no diff tool does."""
    assert split_lines(b"a\rb\r\n\x0cc") == [b"a\rb\r\n", b"\x0cc"]
    assert split_lines(b"") == []


@pytest.mark.parametrize(
    ("before", "after", "count"),
    [
        (b"a\nb\n", b"a\nx\nb\n", 1),
        (b"a\nb", b"a\nb\nx", 1),
        (b"a\n", b"a\n", 0),
        (b"a\nb\n", b"b\na\n", None),
        (b"a\nb\n", b"a\n", None),
        (b"a\n", b"A\n", None),
    ],
)
def test_insertion_only_is_recognised(before: bytes, after: bytes, count: int | None):
    """Every line survives in order, or the answer is None."""
    assert count_inserted(before, after) == count


def test_lost_line_is_named():
    """Number and text of the first line that did not survive."""
    assert first_lost(b"a\nb\nc\n", b"a\nx\nc\n") == (2, b"b")
    assert first_lost(b"a\n", b"a\nb\n") is None
