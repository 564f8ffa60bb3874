# SPDX-License-Identifier: Apache-2.0
"""What one file of Python defines: the names that it binds, and those that a class of it has."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from ddtree_overlay.modules import imports


FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

#: What sets an attribute that it is given the name of; `_set` is that of SGLang's published arguments.
_SETTERS = frozenset({"setattr", "__setattr__", "_set"})


@dataclass(slots=True)
class Module:
    """A file, its names at module level, and the modules that it takes all names of."""

    path: str
    tree: ast.Module
    bindings: dict[str, list[ast.stmt]] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)


def read_module(path: str, data: bytes) -> Module:
    """What a file defines.

    Raises:
        SyntaxError: It is no Python.
    """
    module = Module(path, ast.parse(data))
    typed = set(_for_types(module.tree.body))
    for node in _module_level(module.tree.body):
        for name in _names_bound(node):
            module.bindings.setdefault(name, []).append(node)
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            module.stars += [i.module for i in imports(node, path)] or [node.module or ""]
    for name, nodes in module.bindings.items():
        # Types may be imported from a module that takes them from here: that import never runs.
        module.bindings[name] = [node for node in nodes if node not in typed] or nodes
    return module


def attributes_of(node: ast.ClassDef) -> frozenset[str]:
    """Names that a class defines in its body or sets on `self` or `cls` in a method."""
    names = {n.name for n in node.body if isinstance(n, (FunctionNode, ast.ClassDef))}
    for child in ast.walk(node):
        if (
            isinstance(child, ast.Attribute)
            and isinstance(child.ctx, ast.Store)
            and dotted_tail(child.value) in ("self", "cls")
        ):
            names.add(child.attr)
        elif isinstance(child, ast.Call) and dotted_tail(child.func) in _SETTERS:
            names |= {a.value for a in child.args[:2] if isinstance(a, ast.Constant) and isinstance(a.value, str)}
    for statement in node.body:
        for child in ast.walk(statement) if not isinstance(statement, (FunctionNode, ast.ClassDef)) else ():
            if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
                names.add(child.id)
    return frozenset(names)


def dotted_tail(node: ast.expr) -> str:
    """The last part of a dotted name; empty where it is none."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _module_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, (FunctionNode, ast.ClassDef)):
            continue
        for name in ("body", "orelse", "finalbody"):
            yield from _module_level(getattr(node, name, []))
        for handler in getattr(node, "handlers", []):
            yield from _module_level(handler.body)


def _for_types(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.If) and dotted_tail(node.test) == "TYPE_CHECKING":
            yield from _module_level(node.body)


def _names_bound(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, (FunctionNode, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from ((alias.asname or alias.name).split(".")[0] for alias in node.names)
    elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.For, ast.With)):
        for child in ast.walk(node) if not isinstance(node, (ast.For, ast.With)) else _targets(node):
            if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
                yield child.id


def _targets(node: ast.For | ast.With) -> Iterator[ast.AST]:
    found = [node.target] if isinstance(node, ast.For) else [i.optional_vars for i in node.items if i.optional_vars]
    for target in found:
        yield from ast.walk(target)
