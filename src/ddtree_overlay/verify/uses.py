# SPDX-License-Identifier: Apache-2.0
"""Checks `imports` and `calls`: what our code takes from SGLang exists, and its calls fit the signatures there."""

from __future__ import annotations

import ast
from collections.abc import Collection
from dataclasses import dataclass, field

from ddtree_overlay.modules import imports, module_of
from ddtree_overlay.verify.findings import Finding
from ddtree_overlay.verify.hooks import bound_names
from ddtree_overlay.verify.signatures import Signature, of_callee, of_function, of_method
from ddtree_overlay.verify.symbols import Class, Function, FunctionNode, Missing, Submodule, Symbol, Symbols, Unknown


@dataclass(frozen=True, slots=True)
class Instance:
    """An object of a known class."""

    cls: Class


@dataclass(frozen=True, slots=True)
class Super:
    """`super()` in a method of a class."""

    cls: Class


Value = Symbol | Instance | Super


@dataclass(slots=True)
class Tally:
    """What was checked; undecidable uses are no findings, but they are counted."""

    findings: list[Finding] = field(default_factory=list)
    imported: int = 0
    bound: int = 0
    undecidable: int = 0


def check_imports(symbols: Symbols, path: str, roots: Collection[ast.AST], tally: Tally) -> None:
    """Note every name that `roots` import from SGLang and that is not there."""
    for root in roots:
        for taken in imports(root, path):
            found = symbols.module(taken.module)
            if not isinstance(found, Missing) and taken.name not in (None, "*"):
                found = symbols.resolve(taken.module, taken.name or "")
            tally.imported += 1
            if isinstance(found, Missing):
                message = f"imports what SGLang does not have: {found.what}"
                tally.findings.append(Finding("imports", "error", path, taken.line, message))


def check_calls(
    symbols: Symbols,
    path: str,
    tally: Tally,
    *,
    only: Collection[ast.stmt] | None = None,
    heirs: Collection[Class] = (),
) -> None:
    """Note every call and attribute of a known object that does not fit its definition.

    Args:
        symbols: The snapshot with the overlay laid over it.
        path: The file whose code is checked.
        tally: Where findings and counts go.
        only: Check these statements of the file only (inserted code); default: all of it.
        heirs: Overlay classes; a method that an upstream class lacks may be defined by those that inherit from it.
    """
    tree = symbols.tree(path)
    _Checker(symbols, path, tally, only, heirs).visit(tree)


class _Checker(ast.NodeVisitor):
    def __init__(
        self,
        symbols: Symbols,
        path: str,
        tally: Tally,
        only: Collection[ast.stmt] | None,
        heirs: Collection[Class],
    ) -> None:
        self.symbols = symbols
        self.path = path
        self.tally = tally
        self.only = None if only is None else frozenset(map(id, only))
        self.lines = frozenset(statement.lineno for statement in only or ())
        self.active = only is None
        self.heirs = heirs
        self.imported: frozenset[str] | None = None
        self.classes: list[Class | None] = []
        self.scopes: list[dict[str, Value]] = []

    def visit(self, node: ast.AST) -> None:
        entering = not self.active and self.only is not None and id(node) in self.only
        self.active = self.active or entering
        super().visit(node)
        if entering:
            self.active = False

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        # A class inside a function is not one the symbols know.
        self.classes.append(None if self.scopes else Class(self.path, node))
        self.generic_visit(node)
        self.classes.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._function(node)

    def visit_Call(self, node: ast.Call) -> None:
        if self.active:
            self._check_call(node)
        # The function itself was checked with the call; below it, only what it is taken from is left.
        if isinstance(node.func, ast.Attribute):
            self.visit(node.func.value)
        elif not isinstance(node.func, ast.Name):
            self.visit(node.func)
        for child in (*node.args, *node.keywords):
            self.visit(child)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if self.active and isinstance(node.ctx, ast.Load):
            found = self._member(self._value(node.value), node.attr)
            self._note_missing(found, node)
        self.visit(node.value)

    def _function(self, node: FunctionNode) -> None:
        inside = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        if not self.active and self.lines.isdisjoint(inside):
            return
        for child in (*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(child)
        self.scopes.append(self._locals(node))
        for statement in node.body:
            self.visit(statement)
        self.scopes.pop()

    def _locals(self, node: FunctionNode) -> dict[str, Value]:
        args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        names: dict[str, Value] = {a.arg: self._annotated(a.annotation) for a in args}
        names |= {a.arg: Unknown() for a in (node.args.vararg, node.args.kwarg) if a}
        owner = self.classes[-1] if self.classes and not self.scopes else None
        decorators = {d.id for d in node.decorator_list if isinstance(d, ast.Name)}
        # A mixin says in the annotation of `self` what it is mixed into.
        if owner is not None and args and args[0].annotation is None and "staticmethod" not in decorators:
            names[args[0].arg] = owner if "classmethod" in decorators else Instance(owner)
        assigned: list[str] = [name for statement in node.body for name in bound_names(statement)]
        for name in assigned:
            names[name] = Unknown()
        for statement in ast.walk(node):
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                for taken in imports(statement, self.path):
                    if assigned.count(taken.bound) == 1 and taken.name is not None:
                        names[taken.bound] = _known(self.symbols.resolve(taken.module, taken.name))
        return names

    def _annotated(self, annotation: ast.expr | None) -> Value:
        found = Unknown() if annotation is None else self.symbols.expression(self.path, annotation)
        return Instance(found) if isinstance(found, Class) else Unknown()

    def _value(self, node: ast.expr) -> Value:
        if isinstance(node, ast.Name):
            for scope in reversed(self.scopes):
                if node.id in scope:
                    return scope[node.id]
            return _known(self.symbols.resolve(module_of(self.path), node.id))
        if isinstance(node, ast.Attribute):
            owner = self._value(node.value)
            return _known(self._member(owner, node.attr)) if isinstance(owner, Submodule) else Unknown()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            owner_class = self.classes[-1] if self.classes else None
            if node.func.id == "super" and not node.args and owner_class is not None:
                return Super(owner_class)
            callee = self._value(node.func)
            return Instance(callee) if isinstance(callee, Class) else Unknown()
        return Unknown()

    def _member(self, owner: Value, name: str) -> Symbol:
        if isinstance(owner, Submodule):
            return self.symbols.resolve(owner.name, name)
        if isinstance(owner, Class):
            return self.symbols.member(owner, name)
        if isinstance(owner, Instance):
            found = self.symbols.member(owner.cls, name)
            # Inserted code means members that somebody wrote down, not whatever a `__getattr__` may come up with.
            if isinstance(found, Function) or self.only is None or self.symbols.may_define(owner.cls, name):
                return found
            return self._inherited(owner.cls, name)
        return self.symbols.member(owner.cls, name, skip_own=True) if isinstance(owner, Super) else Unknown()

    def _inherited(self, cls: Class, name: str) -> Symbol:
        """The method as an overlay class that inherits from `cls` defines it."""
        for heir in self.heirs:
            lineage = [base for base in self.symbols.bases(heir) if isinstance(base, Class)]
            if any((base.path, base.node.name) == (cls.path, cls.node.name) for base in lineage[1:]):
                found = self.symbols.member(heir, name)
                if isinstance(found, Function):
                    return found
        return Missing(f"{name} in class {cls.node.name} or in an overlay class that inherits from it")

    def _check_call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute):
            owner = self._value(node.func.value)
            found: Value = self._member(owner, node.func.attr)
            signature = self._signature_on(owner, found)
            known = not isinstance(owner, Unknown)
        else:
            found = self._value(node.func)
            signature = of_callee(self.symbols, found)
            known = not isinstance(found, Unknown) or self._is_imported(node.func)
        if self._note_missing(found, node) or not known:
            return
        if signature is None:
            self.tally.undecidable += 1
            return
        self.tally.bound += 1
        problem = signature.mismatch(node)
        if problem:
            message = f"call of {ast.unparse(node.func)} does not fit its signature: {problem}"
            self.tally.findings.append(Finding("calls", "error", self.path, node.lineno, message))

    def _signature_on(self, owner: Value, found: Value) -> Signature | None:
        if isinstance(owner, (Instance, Super)):
            return of_method(found) if isinstance(found, Function) else None
        if isinstance(owner, Class) and isinstance(found, Function):
            decorators = {d.id for d in found.node.decorator_list if isinstance(d, ast.Name)}
            return of_method(found) if "classmethod" in decorators else of_function(found)
        return of_callee(self.symbols, found)

    def _is_imported(self, func: ast.expr) -> bool:
        if self.imported is None:
            tree = self.symbols.tree(self.path)
            self.imported = frozenset(i.bound for i in imports(tree, self.path)) if self.only is None else frozenset()
        return isinstance(func, ast.Name) and func.id in self.imported

    def _note_missing(self, found: Value, node: ast.expr) -> bool:
        if isinstance(found, Missing):
            message = f"uses what SGLang does not have: {found.what}"
            self.tally.findings.append(Finding("calls", "error", self.path, node.lineno, message))
        return isinstance(found, Missing)


def _known(found: Symbol) -> Symbol:
    """A name that is missing is the `imports` check's to report."""
    return Unknown() if isinstance(found, Missing) else found
