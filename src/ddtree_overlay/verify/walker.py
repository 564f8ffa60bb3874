# SPDX-License-Identifier: Apache-2.0
"""The walk through our code in one file: all of an overlay module, or what was inserted into a file of SGLang's."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from typing import ClassVar

from ddtree_overlay.verify.definitions import FunctionNode
from ddtree_overlay.verify.findings import Finding, Tally
from ddtree_overlay.verify.symbols import Class, Function, Missing, Submodule, Symbol, Symbols, Unknown
from ddtree_overlay.verify.values import Instance, Super, Value, Values


class Walker(ast.NodeVisitor):
    """What the checks of our code have in common: where it is, what its names are, and what objects have.

    Args:
        symbols: The snapshot with the overlay laid over it.
        path: The file whose code is checked.
        tally: Where findings and counts go.
        only: Check these statements of the file only (inserted code); None: all of it.
        heirs: Overlay classes; a method that an upstream class lacks may be defined by those that inherit from it.
    """

    #: What the findings are of.
    check: ClassVar[str]

    def __init__(
        self,
        symbols: Symbols,
        path: str,
        tally: Tally,
        *,
        only: Collection[ast.stmt] | None = None,
        heirs: Collection[Class] = (),
    ) -> None:
        self.symbols = symbols
        self.path = path
        self.tally = tally
        self.only = None if only is None else frozenset(map(id, only))
        self.lines = frozenset(statement.lineno for statement in only or ())
        self.active = only is None
        self.heirs = heirs
        self.values = Values(symbols, path)
        #: What the functions around ask for before they take it: (object, attribute).
        self._asked: list[frozenset[tuple[str, str]]] = []

    def call(self, node: ast.Call) -> None:
        """A call in our code."""

    def attribute(self, node: ast.Attribute) -> None:
        """An attribute that our code reads or sets, other than one that it calls."""

    def error(self, node: ast.expr, message: str) -> None:
        """Note what is wrong at a place."""
        self.tally.findings.append(Finding(self.check, "error", self.path, node.lineno, message))

    def is_missing(self, found: Value, node: ast.expr) -> bool:
        """Whether what our code uses at a place is not there, which is noted."""
        if isinstance(found, Missing):
            self.error(node, f"uses what SGLang does not have: {found.what}")
        return isinstance(found, Missing)

    def visit(self, node: ast.AST) -> None:
        """Go on to a node; of a file of SGLang's only to what has inserted code in it."""
        if not self.active and isinstance(node, ast.stmt):
            if self.lines.isdisjoint(range(node.lineno, (node.end_lineno or node.lineno) + 1)):
                return
            if self.only is not None and id(node) in self.only:
                self.active = True
                super().visit(node)
                self.active = False
                return
        super().visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """A class."""
        self.values.enter_class(node)
        self.generic_visit(node)
        self.values.leave_class()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """A function."""
        self.visit_function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        """A function."""
        self.visit_function(node)

    def visit_Call(self, node: ast.Call) -> None:
        """A call."""
        if self.active:
            self.call(node)
        self.visit(node.func.value if isinstance(node.func, ast.Attribute) else node.func)
        for child in (*node.args, *node.keywords):
            self.visit(child)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """An attribute."""
        if self.active:
            self.attribute(node)
        self.visit(node.value)

    def visit_function(self, node: FunctionNode) -> None:
        """A function of either kind; its annotations are not code that runs."""
        for child in (*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(child)
        calls = [n for n in ast.walk(node) if isinstance(n, ast.Call) and len(n.args) > 1]
        asking = [n for n in calls if called(n) == "hasattr" or (called(n) == "getattr" and len(n.args) > 2)]
        found = [(ast.unparse(call.args[0]), self.values.text(call.args[1])) for call in asking]
        self._asked.append(frozenset((owner, name) for owner, name in found if name is not None))
        self.values.enter_function(node)
        for statement in node.body:
            self.visit(statement)
        self.values.leave_function()
        self._asked.pop()

    def is_asked_for(self, owner: ast.expr, name: str) -> bool:
        """Whether a function around asks with `hasattr`, or a default for `getattr`, if an object has that."""
        return any((ast.unparse(owner), name) in asked for asked in self._asked)

    def member(self, owner: Value, name: str) -> Symbol:
        """What a module, a class or an object has by that name."""
        if isinstance(owner, Submodule):
            return self.symbols.resolve(owner.name, name)
        if isinstance(owner, Class):
            return self.symbols.member(owner, name)
        if isinstance(owner, Instance):
            return self._written(owner, name)
        return self.symbols.member(owner.cls, name, skip_own=True) if isinstance(owner, Super) else Unknown()

    def _written(self, owner: Instance, name: str) -> Symbol:
        """A member that somebody wrote down, not whatever a `__getattr__` may come up with."""
        written = [self.symbols.writes(cls, name) for cls in owner.classes]
        if True in written:
            return self.symbols.member(owner.classes[written.index(True)], name)
        if None in written:
            return Unknown()
        if self.only is None:
            return Missing(f"{name} in class {owner.name}")
        inherited = (self.symbols.member(heir, name) for cls in owner.classes for heir in self._heirs_of(cls))
        missing = Missing(f"{name} in class {owner.name} or in an overlay class that inherits from it")
        return next((found for found in inherited if isinstance(found, Function)), missing)

    def _heirs_of(self, cls: Class) -> Iterator[Class]:
        for heir in self.heirs:
            lineage = [base for base in self.symbols.bases(heir) if isinstance(base, Class)]
            if any((base.path, base.node.name) == (cls.path, cls.node.name) for base in lineage[1:]):
                yield heir


def called(node: ast.Call) -> str:
    """The last part of the name that a call calls."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
