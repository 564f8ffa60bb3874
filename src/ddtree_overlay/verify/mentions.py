# SPDX-License-Identifier: Apache-2.0
"""Every place of a file that names DFlash, or a field to which DDTREE gives another meaning.

Comments, docstrings and messages decide nothing, so only names and strings without blanks count. A mention is written
in a form that a shifted line or another layout does not change: `self.server_args.speculative_num_draft_tokens`,
`batch.spec_algorithm.is_dflash()`, `self.x =` (assigned), `x=` (keyword), `param x`, `def x`, `class X`, `import X`,
`"DFLASH"`.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import dataclass, field


WATCHED = re.compile(r"DFLASH|dflash|DFlash|speculative_num_draft_tokens|speculative_eagle_topk")
MODULE = "<module>"


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A scope of a file."""

    path: str
    scope: str


@dataclass(slots=True)
class Mentions:
    """How often a scope makes each mention, and the line of the first one."""

    counts: Counter[str] = field(default_factory=Counter)
    lines: dict[str, int] = field(default_factory=dict)


def mentions_in(path: str, data: bytes) -> dict[Place, Mentions]:
    """The mentions of a Python file by scope.

    Raises:
        SyntaxError: The file does not parse here.
    """
    if not WATCHED.search(data.decode("utf-8", "replace")):
        return {}
    collector = _Collector(path)
    collector.visit(ast.parse(data))
    return collector.found


class _Collector(ast.NodeVisitor):
    def __init__(self, path: str) -> None:
        self.path = path
        self.scope: list[str] = []
        self.found: dict[Place, Mentions] = {}

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._definition("class", node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._definition("def", node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._definition("def", node)

    def visit_Call(self, node: ast.Call) -> None:
        name = _last(node.func)
        if name is None or not WATCHED.search(name):
            self.generic_visit(node)
            return
        self._note(f"{_dotted(node.func)}()", node)
        if isinstance(node.func, ast.Attribute):
            self.visit(node.func.value)
        for child in (*node.args, *node.keywords):
            self.visit(child)

    def visit_Name(self, node: ast.Name) -> None:
        self._name(node.id, node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._name(node.attr, node)
        self.visit(node.value)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg and WATCHED.search(node.arg):
            self._note(f"{node.arg}=", node.value)
        self.visit(node.value)

    def visit_arg(self, node: ast.arg) -> None:
        if WATCHED.search(node.arg):
            self._note(f"param {node.arg}", node)
        self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self._imported(node, [alias.name for alias in node.names])

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self._imported(node, [node.module or "", *(alias.name for alias in node.names)])

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and WATCHED.search(node.value) and not re.search(r"\s", node.value):
            self._note(f'"{node.value}"', node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        for value in node.values:
            if isinstance(value, ast.FormattedValue):
                self.visit(value.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):
            self.visit(node.value)

    def _definition(self, kind: str, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if WATCHED.search(node.name):
            self._note(f"{kind} {node.name}", node)
        self.scope.append(node.name)
        self.generic_visit(node)
        self.scope.pop()

    def _imported(self, node: ast.stmt, names: list[str]) -> None:
        for name in names:
            if WATCHED.search(name):
                self._note(f"import {name}", node)

    def _name(self, name: str, node: ast.Name | ast.Attribute) -> None:
        if WATCHED.search(name):
            stored = isinstance(node.ctx, (ast.Store, ast.Del))
            self._note(_dotted(node) + (" =" if stored else ""), node)

    def _note(self, text: str, node: ast.AST) -> None:
        place = Place(self.path, ".".join(self.scope) or MODULE)
        mentions = self.found.setdefault(place, Mentions())
        mentions.counts[text] += 1
        mentions.lines.setdefault(text, getattr(node, "lineno", 0))


def _last(node: ast.expr) -> str | None:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Call):
        return f"{_dotted(node.func)}()"
    return "?"
