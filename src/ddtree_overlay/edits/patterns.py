# SPDX-License-Identifier: Apache-2.0
"""Statement patterns: Python with `...` for "anything", turned into libcst matchers.

`x = f(...)`          any arguments          `x = ...`      any value
`f("--flag", ...)`    any further arguments   `if x: ...`    any body, any else
Layout, comments and the kind of quotes never matter.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    import libcst as cst
    import libcst.matchers as m
else:
    from ddtree_overlay.edits.lazy import cst, m


#: Fields that hold layout, not meaning.
_LAYOUT = frozenset(
    {
        "asynchronous_whitespace",
        "colon",
        "comma",
        "dot",
        "equal",
        "footer",
        "header",
        "indent",
        "lbracket",
        "leading_lines",
        "lines_after_decorators",
        "lpar",
        "rbracket",
        "rpar",
        "semicolon",
        "trailing_whitespace",
    }
)


@cache
def pattern(text: str) -> Any:
    """The matcher for one statement (cached: patterns are constants of the edits)."""
    return _statement(cst.parse_statement(text + "\n"))


def matches(node: cst.CSTNode, wanted: Any) -> bool:
    """Whether a statement matches. A line that holds two statements (`a; b`) never does."""
    return m.matches(node, wanted)


def _statement(node: cst.CSTNode) -> Any:
    if isinstance(node, cst.If) and _is_any(node.body):
        return m.If(test=_node(node.test))
    return _node(node)


def _node(node: cst.CSTNode) -> Any:
    if isinstance(node, cst.Ellipsis):
        return m.DoNotCare()
    if isinstance(node, cst.SimpleString):
        return m.SimpleString(value=m.MatchIfTrue(_same_string(ast.literal_eval(node.value))))
    if isinstance(node, cst.Annotation) and isinstance(node.annotation, cst.Ellipsis):
        return m.DoNotCare()
    matcher = getattr(m, type(node).__name__)
    return matcher(**{f.name: _value(getattr(node, f.name)) for f in fields(node) if not _is_layout(f.name)})


def _value(value: object) -> Any:
    if isinstance(value, cst.CSTNode):
        return _node(value)
    if isinstance(value, (tuple, list)):
        items = [_node(item) for item in value]
        last = value[-1] if value else None
        if isinstance(last, cst.Arg) and isinstance(last.value, cst.Ellipsis):
            items[-1] = m.ZeroOrMore()
        return items
    if isinstance(value, cst.MaybeSentinel):
        return m.DoNotCare()
    return value


def _is_layout(name: str) -> bool:
    return name in _LAYOUT or name.startswith("whitespace")


def _is_any(body: cst.CSTNode) -> bool:
    return isinstance(body, cst.SimpleStatementSuite) and m.matches(
        body, m.SimpleStatementSuite(body=[m.Expr(m.Ellipsis())])
    )


def _same_string(wanted: object) -> Callable[[str], bool]:
    return lambda raw: bool(ast.literal_eval(raw) == wanted)
