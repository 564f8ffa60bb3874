# SPDX-License-Identifier: Apache-2.0
"""What a name or an expression of our code is, as far as annotations, constructors and the table of receivers say."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from ddtree_overlay.modules import imports, module_of
from ddtree_overlay.receivers import RECEIVERS
from ddtree_overlay.verify.definitions import FunctionNode
from ddtree_overlay.verify.hooks import bound_names
from ddtree_overlay.verify.symbols import Class, Function, Missing, Submodule, Symbol, Symbols, Unknown


@dataclass(frozen=True, slots=True)
class Instance:
    """An object of a known class: what one of `classes` has, the object may have."""

    classes: tuple[Class, ...]

    @property
    def name(self) -> str:
        """What findings call it."""
        return self.classes[0].node.name


@dataclass(frozen=True, slots=True)
class Super:
    """`super()` in a method of a class."""

    cls: Class


@dataclass(frozen=True, slots=True)
class _Assigned:
    """A local variable that is bound once, to the value of an expression."""

    expression: ast.expr


Value = Symbol | Instance | Super
_Names = dict[str, "Value | _Assigned"]


class Values:
    """What is known while the code of one file is walked through.

    Args:
        symbols: The snapshot with the overlay laid over it.
        path: The file.
    """

    def __init__(self, symbols: Symbols, path: str) -> None:
        self._symbols = symbols
        self._path = path
        self._classes: list[Class | None] = []
        self._scopes: list[_Names] = []

    def enter_class(self, node: ast.ClassDef) -> None:
        """What follows is the body of a class."""
        # A class inside a function is not one the symbols know.
        self._classes.append(None if self._scopes else Class(self._path, node))

    def leave_class(self) -> None:
        """The class is over."""
        self._classes.pop()

    def enter_function(self, node: FunctionNode) -> None:
        """What follows is the body of a function."""
        decorators = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
        is_kernel = any(_tail(d) == "jit" for d in decorators)
        # A kernel's names are pointers and numbers, whatever they are called elsewhere.
        self._scopes.append({} if is_kernel else self._parameters(node) | self._locals(node))

    def leave_function(self) -> None:
        """The function is over."""
        self._scopes.pop()

    def text(self, node: ast.expr) -> str | None:
        """The string that an expression is, also by the name of a constant; None when it is not known to be one."""
        if isinstance(node, ast.Name) and not any(node.id in scope for scope in self._scopes):
            constant = self._symbols.constant(module_of(self._path), node.id)
            return constant if isinstance(constant, str) else None
        return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None

    def of(self, node: ast.expr) -> Value:
        """What an expression is."""
        if isinstance(node, ast.Name):
            return self._named(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.of(node.value)
            if isinstance(owner, Submodule):
                return _known(self._symbols.resolve(owner.name, node.attr))
            qualified = self._receiver(f"{_tail(node.value)}.{node.attr}")
            return self._receiver(node.attr) if isinstance(qualified, Unknown) else qualified
        if isinstance(node, ast.Call):
            return self._returned(node)
        return Unknown()

    def listed(self, name: str) -> Value:
        """An object of a class that the table of receivers has; `Unknown` where the snapshot has none of it."""
        classes = self._symbols.listed(name)
        return Instance(classes) if classes else Unknown()

    def _named(self, name: str) -> Value:
        for scope in reversed(self._scopes):
            if name in scope:
                found: Value | _Assigned = scope[name]
                if isinstance(found, _Assigned):
                    scope[name] = Unknown()  # while its own value is looked at
                    found = scope[name] = self.of(found.expression)
                return found
        return _known(self._symbols.resolve(module_of(self._path), name))

    def _returned(self, node: ast.Call) -> Value:
        if isinstance(node.func, ast.Attribute):
            return self._receiver(node.func.attr + "()")
        if not isinstance(node.func, ast.Name):
            return Unknown()
        owner = self._classes[-1] if self._classes else None
        if node.func.id == "super" and not node.args and owner is not None:
            return Super(owner)
        callee = self.of(node.func)
        if isinstance(callee, Class):
            return Instance((callee,))
        listed = self._receiver(node.func.id + "()")
        if isinstance(callee, Function) and isinstance(listed, Unknown):
            return self._annotated(callee.node.returns, callee.path)
        return listed

    def _receiver(self, name: str) -> Value:
        """What the table says of a name, with or without an underscore before it."""
        return self.listed(RECEIVERS.get(name.lstrip("_"), ""))

    def _annotated(self, annotation: ast.expr | None, path: str) -> Value:
        classes: list[Class] = []
        for part in _alternatives(annotation):
            known = self._symbols.listed(_tail(part)) or (self._symbols.expression(path, part),)
            if not all(isinstance(cls, Class) for cls in known):
                return Unknown()
            classes += [cls for cls in known if isinstance(cls, Class)]
        return Instance(tuple(classes)) if classes else Unknown()

    def _parameters(self, node: FunctionNode) -> _Names:
        args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        names: _Names = {a.arg: self._parameter(a) for a in args}
        names |= {a.arg: Unknown() for a in (node.args.vararg, node.args.kwarg) if a}
        owner = self._classes[-1] if self._classes and not self._scopes else None
        decorators = {d.id for d in node.decorator_list if isinstance(d, ast.Name)}
        # A mixin says in the annotation of `self` what it is mixed into.
        if owner is not None and args and args[0].annotation is None and "staticmethod" not in decorators:
            names[args[0].arg] = owner if "classmethod" in decorators else self._self(owner)
        return names

    def _parameter(self, arg: ast.arg) -> Value:
        if arg.annotation is None or _tail(arg.annotation) in ("Any", "object"):
            return self._receiver(arg.arg)
        return self._annotated(arg.annotation, self._path)

    def _self(self, owner: Class) -> Instance:
        """An object of a class, which also has what the table says of a base."""
        lineage = [base.node.name for base in self._symbols.bases(owner) if isinstance(base, Class)]
        listed = [self.listed(name) for name in lineage]
        return Instance((owner, *(cls for found in listed if isinstance(found, Instance) for cls in found.classes)))

    def _locals(self, node: FunctionNode) -> _Names:
        bound = [name for statement in node.body for name in bound_names(statement)]
        arguments = {a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)}
        once = {name for name in bound if bound.count(name) == 1} - arguments
        names: _Names = {name: self._receiver(name) for name in bound}
        for child in ast.walk(node):
            if isinstance(child, (ast.Import, ast.ImportFrom)):
                for taken in imports(child, self._path):
                    if taken.bound in once and taken.name is not None:
                        names[taken.bound] = _known(self._symbols.resolve(taken.module, taken.name))
            elif isinstance(child, ast.Assign):
                assigned = {name: _Assigned(value) for name, value in _pairs(child) if name in once}
                names |= {name: value for name, value in assigned.items() if isinstance(names[name], Unknown)}
        return names


def _pairs(node: ast.Assign) -> Iterator[tuple[str, ast.expr]]:
    for target in node.targets:
        if isinstance(target, ast.Name):
            yield target.id, node.value
        elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            for name, value in zip(target.elts, node.value.elts, strict=False):
                if isinstance(name, ast.Name):
                    yield name.id, value


def _alternatives(annotation: ast.expr | None) -> Iterator[ast.expr]:
    """What an annotation may mean but None: both sides of `|`, and what is optional."""
    if isinstance(annotation, ast.BinOp):
        yield from _alternatives(annotation.left)
        yield from _alternatives(annotation.right)
    elif isinstance(annotation, ast.Subscript) and _tail(annotation.value) == "Optional":
        yield from _alternatives(annotation.slice)
    elif annotation is not None and not (isinstance(annotation, ast.Constant) and annotation.value is None):
        yield annotation


def _tail(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _known(found: Symbol) -> Symbol:
    """A name that is missing is the `imports` check's to report."""
    return Unknown() if isinstance(found, Missing) else found
