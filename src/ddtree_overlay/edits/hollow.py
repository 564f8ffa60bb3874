# SPDX-License-Identifier: Apache-2.0
"""Leave out what an edit does not look at: the bodies of all functions but those it names.

libcst spends most of a second on a file of ten thousand lines, nearly all of it on functions that the edit never sees.
Here each such body is one line, `pass` with a number, while the tree is made and changed; then the bodies are put back,
byte for byte. Every class and every `def` line stays, so scopes are found, and found to be doubled, as before.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterator


_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n|$)")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def hollow(data: bytes, scopes: Collection[str]) -> tuple[bytes, Callable[[bytes], bytes]]:
    """A file without the bodies of functions that none of `scopes` names or lies in, and what puts them back.

    Args:
        data: Python that parses here.
        scopes: Dotted names of classes and functions.

    Returns:
        The shorter file, and a function from what was made of it to what would have been made of the whole file.

    Raises:
        SyntaxError: This Python cannot parse the file; libcst may.
        ValueError: As `SyntaxError`, for null bytes and unknown encodings.
    """
    lines = _LINE.findall(data)
    mark = _unused(data)
    bodies: list[bytes] = []
    for first, last in reversed(list(_bodies(ast.parse(data).body, "", scopes))):
        kept = lines[first - 1 : last]
        indent = re.match(rb"[ \t]*", kept[0])
        newline = re.search(rb"[\r\n]*$", kept[-1])
        assert indent is not None
        assert newline is not None
        if b"".join(kept[:1])[indent.end() :].startswith((b"\f", b"\\")):
            continue
        bodies.append(b"".join(kept)[: len(b"".join(kept)) - len(newline.group())])
        lines[first - 1 : last] = [indent.group() + b"pass  # " + mark % (len(bodies) - 1) + newline.group()]
    stood_for = re.compile(rb"[ \t]*pass  # " + mark.replace(b"%d", rb"(\d+)") + rb"(?=[\r\n]|$)")

    def filled(changed: bytes) -> bytes:
        return stood_for.sub(lambda found: bodies[int(found.group(1))], changed)

    return b"".join(lines), filled


def _bodies(body: list[ast.stmt], scope: str, scopes: Collection[str]) -> Iterator[tuple[int, int]]:
    """First and last line of each body that may be left out, in order."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _bodies(node.body, f"{scope}{node.name}.", scopes)
        elif isinstance(node, _FUNCTIONS):
            name = f"{scope}{node.name}"
            first, last = node.body[0], node.body[-1].end_lineno
            start = min([first.lineno, *(d.lineno for d in getattr(first, "decorator_list", ()))])
            assert last is not None
            # A body on the line of its `def`, or behind a signature that ends there, has no lines of its own.
            own = start > _signature_end(node)
            if own and not any(wanted == name or wanted.startswith(f"{name}.") for wanted in scopes):
                yield start, last


def _signature_end(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The last line on which something of the signature stands, the colon aside."""
    parts = [*ast.walk(node.args), *(ast.walk(node.returns) if node.returns else ())]
    return max([node.lineno, *(getattr(part, "end_lineno", 0) or 0 for part in parts)])


def _unused(data: bytes) -> bytes:
    """A mark for a numbered line that the file does not hold."""
    mark = b"left out %d"
    while mark.replace(b" %d", b"") in data:
        mark = b"x" + mark
    return mark
