# SPDX-License-Identifier: Apache-2.0
"""Checks `imports` and `calls`: what our code takes from SGLang exists, and its calls fit the signatures there."""

from __future__ import annotations

import ast
from collections.abc import Collection
from functools import cached_property

from ddtree_overlay.modules import imports
from ddtree_overlay.verify.findings import Finding, Tally
from ddtree_overlay.verify.signatures import Signature, of_callee, of_function, of_method
from ddtree_overlay.verify.symbols import Class, Function, Missing, Symbols, Unknown
from ddtree_overlay.verify.values import Instance, Super, Value
from ddtree_overlay.verify.walker import Walker


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
    """Note every call that does not fit the definition of what is called.

    Args:
        symbols: The snapshot with the overlay laid over it.
        path: The file whose code is checked.
        tally: Where findings and counts go.
        only: Check these statements of the file only (inserted code); default: all of it.
        heirs: Overlay classes; a method that an upstream class lacks may be defined by those that inherit from it.
    """
    tree = symbols.tree(path)
    _Calls(symbols, path, tally, only=only, heirs=heirs).visit(tree)


class _Calls(Walker):
    check = "calls"

    def call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute):
            if self.is_asked_for(node.func.value, node.func.attr):
                return
            owner = self.values.of(node.func.value)
            found: Value = self.member(owner, node.func.attr)
            signature = self._signature_on(owner, found)
            known = not isinstance(owner, Unknown)
        else:
            found = self.values.of(node.func)
            signature = of_callee(self.symbols, found)
            known = not isinstance(found, Unknown) or (
                isinstance(node.func, ast.Name) and node.func.id in self._imported
            )
        if self.is_missing(found, node) or not known:
            return
        if signature is None:
            self.tally.undecidable += 1
            return
        self.tally.bound += 1
        problem = signature.mismatch(node)
        if problem:
            self.error(node, f"call of {ast.unparse(node.func)} does not fit its signature: {problem}")

    def _signature_on(self, owner: Value, found: Value) -> Signature | None:
        if isinstance(owner, (Instance, Super)):
            return of_method(found) if isinstance(found, Function) else None
        if isinstance(owner, Class) and isinstance(found, Function):
            decorators = {d.id for d in found.node.decorator_list if isinstance(d, ast.Name)}
            return of_method(found) if "classmethod" in decorators else of_function(found)
        return of_callee(self.symbols, found)

    @cached_property
    def _imported(self) -> frozenset[str]:
        """Names that a module of the overlay has from SGLang; inserted code has the names of its file."""
        tree = self.symbols.tree(self.path)
        return frozenset(i.bound for i in imports(tree, self.path)) if self.only is None else frozenset()
