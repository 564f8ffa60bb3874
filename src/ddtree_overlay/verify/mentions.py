# SPDX-License-Identifier: Apache-2.0
"""Every place of a file that names DFlash or a field that DDTREE reads differently, or takes the algorithm as data.

Comments, docstrings and messages decide nothing, so only names and strings without blanks count. A mention is written
in a form that a shifted line or another layout does not change: `self.server_args.speculative_num_draft_tokens`,
`batch.spec_algorithm.is_dflash()`, `self.x =` (assigned), `x=` (keyword), `param x`, `def x`, `class X`, `import X`,
`alias X as Y`, `"DFLASH"`.

The algorithm as data is what a list of names does not show: a table that is indexed with it (`[spec_algorithm]`), a set
that has a name of its own (`in _FAST`), a text made of it (`f"{spec_algorithm}"`, `spec_algorithm.name`), a part of its
name (`speculative_algorithm.startswith()`, `in speculative_algorithm`), or all of them (`each SpeculativeAlgorithm`).
"""

from __future__ import annotations

import ast
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field


#: DFlash under any spelling; widths, under the names that carry them; and the mask, which DFLASH may do without.
_NAMES = (
    r"(?i:dflash)|speculative_num_draft_tokens|speculative_eagle_topk|custom_mask"
    r"|resolve_num_tokens_per_req|for_target_verify"
)
#: An expression that holds the algorithm or its name.
_ALGORITHM = re.compile(r"^_?(spec|speculative)_(algorithm|algo|alg)$")
_ENUM = "SpeculativeAlgorithm"
_SAME_NAME = ("upper", "lower", "strip", "casefold")
_PART_OF_A_NAME = ("startswith", "endswith", "find", "index", "replace", "split", "partition", "removeprefix", "format")
_TAKES_ALL = ("list", "tuple", "set", "frozenset", "sorted", "iter", "len", "max", "min", "enumerate", "map", "filter")
_RAISED = ("Error", "Exception", "Warning", "Rejected")
#: What a file must contain to hold a mention, and so to be part of every snapshot. The algorithm as data is looked for
#: wherever the algorithm is named.
WATCHED = re.compile(rf"{_NAMES}|(?:spec|speculative)_algo|{_ENUM}".encode())
_WATCHED_LINE = re.compile(WATCHED.pattern + rb"|(?:spec|speculative)_alg")
_WATCHED_NAME = re.compile(_NAMES)
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
    if not WATCHED.search(data):
        return {}
    collector = _Collector(path, _watched_lines(data))
    collector.visit(ast.parse(data))
    return collector.found


def _watched_lines(data: bytes) -> list[int]:
    ends = [end.end() for end in re.finditer(rb"\r\n|\r|\n", data)]
    return [bisect_right(ends, found.start()) + 1 for found in _WATCHED_LINE.finditer(data)]


class _Collector(ast.NodeVisitor):
    def __init__(self, path: str, watched: Sequence[int]) -> None:
        self.path = path
        #: The lines on which a mention can stand, in order.
        self.watched = watched
        self.scope: list[str] = []
        self.found: dict[Place, Mentions] = {}
        #: Whether the code at hand only says something: the arguments of a logger, what is raised or asserted.
        self.speaking = False

    def visit(self, node: ast.AST) -> None:
        """Leave out what stands on no watched line: nearly everything, which is most of the time this takes."""
        last = getattr(node, "end_lineno", None)
        if last is not None:
            decorators = getattr(node, "decorator_list", ())
            first = decorators[0].lineno if decorators else getattr(node, "lineno", 0)
            at = bisect_left(self.watched, first)
            if at == len(self.watched) or self.watched[at] > last:
                return
        super().visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._definition("class", node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._definition("def", node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._definition("def", node)

    def visit_Call(self, node: ast.Call) -> None:
        self._algorithm_called(node)
        spoken, self.speaking = self.speaking, self.speaking or _speaks(node.func)
        name = _last(node.func)
        if name is None or not _WATCHED_NAME.search(name):
            self.generic_visit(node)
        else:
            self._note(f"{_dotted(node.func)}()", node)
            if isinstance(node.func, ast.Attribute):
                self.visit(node.func.value)
            for child in (*node.args, *node.keywords):
                self.visit(child)
        self.speaking = spoken

    def visit_Name(self, node: ast.Name) -> None:
        self._name(node.id, node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._name(node.attr, node)
        if node.attr in ("name", "value") and _is_algorithm(node.value) and not self.speaking:
            self._note(_dotted(node), node)
        if node.attr == "__members__" and _last(node.value) == _ENUM:
            self._note(f"each {_ENUM}", node)
        self.visit(node.value)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if _is_algorithm(node.slice):
            self._note(f"[{_dotted(node.slice)}]", node)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            if not isinstance(op, (ast.In, ast.NotIn)):
                continue
            if _is_algorithm(left) and _last(right) is not None:
                self._note(f"in {_dotted(right)}", node)
            if _is_algorithm(right):
                self._note(f"in {_dotted(right)}", node)
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self._iterated(node.iter)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self._iterated(node.iter)
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._speak(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        self.visit(node.test)
        if node.msg is not None:
            self._speak(node.msg)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg and _WATCHED_NAME.search(node.arg):
            self._note(f"{node.arg}=", node.value)
        self.visit(node.value)

    def visit_arg(self, node: ast.arg) -> None:
        if _WATCHED_NAME.search(node.arg):
            self._note(f"param {node.arg}", node)
        self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self._imported(node, [(alias.name, alias.asname) for alias in node.names])

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self._imported(node, [(node.module or "", None), *((alias.name, alias.asname) for alias in node.names)])

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and _WATCHED_NAME.search(node.value) and not re.search(r"\s", node.value):
            self._note(f'"{node.value}"', node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        for value in node.values:
            if isinstance(value, ast.FormattedValue):
                if _is_algorithm(value.value) and not self.speaking:
                    self._note(f'f"{{{_dotted(value.value)}}}"', node)
                self.visit(value.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):
            self.visit(node.value)

    def _definition(self, kind: str, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if _WATCHED_NAME.search(node.name):
            self._note(f"{kind} {node.name}", node)
        self.scope.append(node.name)
        self.generic_visit(node)
        self.scope.pop()

    def _imported(self, node: ast.stmt, names: list[tuple[str, str | None]]) -> None:
        for name, alias in names:
            if _WATCHED_NAME.search(name):
                # Under another name its uses would not be seen.
                self._note(f"alias {name} as {alias}" if alias else f"import {name}", node)

    def _name(self, name: str, node: ast.Name | ast.Attribute) -> None:
        if _WATCHED_NAME.search(name):
            stored = isinstance(node.ctx, (ast.Store, ast.Del))
            self._note(_dotted(node) + (" =" if stored else ""), node)

    def _algorithm_called(self, node: ast.Call) -> None:
        func, first = node.func, node.args[0] if node.args else None
        if isinstance(func, ast.Attribute):
            if func.attr in _PART_OF_A_NAME and _is_algorithm(func.value):
                self._note(f"{_dotted(func)}()", node)
            if func.attr in ("get", "pop", "setdefault") and first is not None and _is_algorithm(first):
                self._note(f"[{_dotted(first)}]", node)
        elif isinstance(func, ast.Name):
            asked = node.args[1] if len(node.args) > 1 else None
            computed = func.id == "getattr" and not isinstance(asked, ast.Constant)
            if computed and first is not None and _is_algorithm(first):
                self._note(f"getattr({_dotted(first)})", node)
            for argument in node.args if func.id in _TAKES_ALL else ():
                self._iterated(argument)

    def _iterated(self, node: ast.expr) -> None:
        if _last(node) == _ENUM:
            self._note(f"each {_ENUM}", node)

    def _speak(self, node: ast.AST) -> None:
        spoken, self.speaking = self.speaking, True
        self.generic_visit(node)
        self.speaking = spoken

    def _note(self, text: str, node: ast.AST) -> None:
        place = Place(self.path, ".".join(self.scope) or MODULE)
        mentions = self.found.setdefault(place, Mentions())
        mentions.counts[text] += 1
        mentions.lines.setdefault(text, getattr(node, "lineno", 0))


def _is_algorithm(node: ast.expr) -> bool:
    """Whether the expression is the algorithm or its name, also in another case (`(algorithm or "").upper()`)."""
    while True:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr not in _SAME_NAME:
                return False
            node = node.func.value
        elif isinstance(node, ast.BoolOp):
            node = node.values[0]
        elif isinstance(node, ast.Attribute) and node.attr in ("name", "value"):
            node = node.value
        else:
            break
    name = _last(node)
    return name is not None and bool(_ALGORITHM.match(name))


def _speaks(func: ast.expr) -> bool:
    if isinstance(func, ast.Attribute):
        return (_last(func.value) or "").lower() in ("logger", "logging", "log", "warnings")
    return isinstance(func, ast.Name) and (func.id in ("print", "print_warning_once") or func.id.endswith(_RAISED))


def _last(node: ast.AST) -> str | None:
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
    if isinstance(node, ast.BoolOp):
        return _dotted(node.values[0])
    return "?"
