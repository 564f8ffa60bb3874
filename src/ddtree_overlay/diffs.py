# SPDX-License-Identifier: Apache-2.0
"""Unified diffs of bytes, exact for every line ending, and the count of lines that one file has over another."""

from __future__ import annotations

import difflib


_NO_NEWLINE = b"\n\\ No newline at end of file\n"


def unified(path: str, before: bytes | None, after: bytes | None, *, context: int = 3, mode: int = 0o644) -> bytes:
    """The diff that `git apply` turns `before` into `after` with; empty when they are equal.

    Args:
        path: The POSIX path as it stands behind `a/` and `b/`.
        before: None when the file is new.
        after: None when the file goes away.
        context: Lines of context; with 0 the diff holds no upstream line (`git apply --unidiff-zero`).
        mode: Permission bits for a file that is new or goes away.
    """
    if before == after:
        return b""
    name = path.encode()
    head = [b"diff --git a/" + name + b" b/" + name + b"\n"]
    if before is None:
        head.append(b"new file mode 100%03o\n" % mode)
    if after is None:
        head.append(b"deleted file mode 100%03o\n" % mode)
    hunks = _hunks(split_lines(before or b""), split_lines(after or b""), context)
    if hunks:
        head.append(b"--- " + (b"/dev/null" if before is None else b"a/" + name) + b"\n")
        head.append(b"+++ " + (b"/dev/null" if after is None else b"b/" + name) + b"\n")
    return b"".join(head) + b"".join(hunks)


def split_lines(data: bytes) -> list[bytes]:
    r"""`data` cut behind each `\n` and nowhere else.

    `bytes.splitlines` also cuts at a lone `\r`, which git and patch do not.
    """
    lines = data.split(b"\n")
    tail = lines.pop()
    return [line + b"\n" for line in lines] + ([tail] if tail else [])


def count_inserted(before: bytes, after: bytes) -> int | None:
    """How many lines `after` has more, or None when a line of `before` did not survive in its order."""
    rest = iter(after.split(b"\n"))
    wanted = before.split(b"\n")
    if all(any(line == candidate for candidate in rest) for line in wanted):
        return after.count(b"\n") - before.count(b"\n")
    return None


def first_lost(before: bytes, after: bytes) -> tuple[int, bytes] | None:
    """The first line of `before` (number from 1, text) that `after` changed or dropped, or None."""
    matcher = difflib.SequenceMatcher(None, before.split(b"\n"), after.split(b"\n"), autojunk=False)
    for tag, start, end, _, _ in matcher.get_opcodes():
        if tag in ("replace", "delete") and end > start:
            return start + 1, before.split(b"\n")[start]
    return None


def _hunks(before: list[bytes], after: list[bytes], context: int) -> list[bytes]:
    # autojunk would call frequent lines of a long file noise, and align the rest wrongly.
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    groups = list(matcher.get_grouped_opcodes(context))
    if groups and context == 0:
        groups[-1] = _with_line_before(groups[-1], before)
    return [_hunk(before, after, group) for group in groups]


def _with_line_before(
    group: list[tuple[str, int, int, int, int]], before: list[bytes]
) -> list[tuple[str, int, int, int, int]]:
    """The last hunk; where it only removes a last line without a newline, the line before that is rewritten with it.

    Git would take the newline of the line before away as well, since nothing in the hunk says that it has one.
    """
    tag, start, end, new_start, new_end = group[-1]
    if tag != "delete" or end < len(before) or before[-1].endswith(b"\n") or start == 0:
        return group
    return [("replace", start - 1, end, new_start - 1, new_end)]  # without context a hunk is one change


def _hunk(before: list[bytes], after: list[bytes], group: list[tuple[str, int, int, int, int]]) -> bytes:
    old, new = (group[0][1], group[-1][2]), (group[0][3], group[-1][4])
    out = [b"@@ -" + _range(*old) + b" +" + _range(*new) + b" @@\n"]
    for tag, old_start, old_end, new_start, new_end in group:
        if tag == "equal":
            out += [b" " + line for line in before[old_start:old_end]]
        else:
            out += [b"-" + line for line in before[old_start:old_end]]
            out += [b"+" + line for line in after[new_start:new_end]]
    return b"".join(line if line.endswith(b"\n") else line + _NO_NEWLINE for line in out)


def _range(start: int, end: int) -> bytes:
    length = end - start
    # An empty range names the line before it.
    first = start + 1 if length else start
    return b"%d" % first if length == 1 else b"%d,%d" % (first, length)
