# SPDX-License-Identifier: Apache-2.0
"""Results as lines of styled text. Pure: nothing here prints, `render` does."""

from __future__ import annotations

from collections.abc import Iterable


#: A piece of text and what it means: a key of `render.STYLES`.
Part = tuple[str, str]
Line = tuple[Part, ...]


def row(*parts: str | Part) -> Line:
    """One line of `parts`; a bare string has no style."""
    return tuple((p, "") if isinstance(p, str) else p for p in parts)


def plain(line: Line) -> str:
    """The line without its styles."""
    return "".join(text for text, _ in line)


def counted(number: int, thing: str, things: str = "") -> str:
    """`1 file`, `2 files`."""
    return f"{number} {thing if number == 1 else things or thing + 's'}"


def listed(names: Iterable[str], limit: int = 5) -> str:
    """`a, b, c` with the rest counted."""
    every = list(names)
    rest = f" and {len(every) - limit} more" if len(every) > limit else ""
    return ", ".join(every[:limit]) + rest
