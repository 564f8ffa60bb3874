# SPDX-License-Identifier: Apache-2.0
"""Whether the arguments of a call fit a signature, read from source."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace

from ddtree_overlay.verify.symbols import Class, Function, Symbols, Unknown


#: Decorators that leave the signature of a function as it is written.
_TRANSPARENT = frozenset(
    {"abstractmethod", "staticmethod", "classmethod", "no_grad", "inference_mode", "cache", "lru_cache"}
)


@dataclass(frozen=True, slots=True)
class Signature:
    """What a callable accepts; `required` names what has no default.

    Args:
        positional: Names that can be given by position, in order.
        positional_only: How many of them cannot be given by name.
        keyword_only: Names that can be given by name only.
        required: Names without a default.
        more_positional: Whether it takes `*args`.
        more_keywords: Whether it takes `**kwargs`.
    """

    positional: tuple[str, ...]
    positional_only: int
    keyword_only: frozenset[str]
    required: frozenset[str]
    more_positional: bool = False
    more_keywords: bool = False

    def mismatch(self, call: ast.Call) -> str | None:
        """Why the arguments do not fit, or None. Arguments behind `*` or `**` are taken to fit."""
        open_positional = any(isinstance(a, ast.Starred) for a in call.args)
        open_keywords = any(k.arg is None for k in call.keywords)
        given = sum(not isinstance(a, ast.Starred) for a in call.args)
        if given > len(self.positional) and not self.more_positional:
            return f"{given} positional arguments, {len(self.positional)} are taken"
        by_position = frozenset(self.positional[:given])
        by_name = frozenset(self.positional[self.positional_only :]) | self.keyword_only
        names = [k.arg for k in call.keywords if k.arg is not None]
        for name in names:
            if name in by_position:
                return f"argument {name!r} is given twice"
            if name not in by_name and not self.more_keywords:
                return f"there is no argument {name!r}"
        absent = self.required - by_position - frozenset(names)
        if open_keywords or open_positional:
            absent -= by_name if open_keywords else frozenset(self.positional)
        return f"argument {min(absent)!r} is missing" if absent else None

    def bound(self) -> Signature:
        """The signature without its first argument (`self`, `cls`)."""
        if not self.positional:
            return self
        first = {self.positional[0]}
        only = max(0, self.positional_only - 1)
        return replace(self, positional=self.positional[1:], positional_only=only, required=self.required - first)


def of_function(function: Function) -> Signature | None:
    """The signature as written, or None when a decorator may change it."""
    if any(_decorator(d) not in _TRANSPARENT for d in function.node.decorator_list):
        return None
    args = function.node.args
    positional = [a.arg for a in (*args.posonlyargs, *args.args)]
    keyword_only = [a.arg for a in args.kwonlyargs]
    required = positional[: len(positional) - len(args.defaults)]
    required += [name for name, default in zip(keyword_only, args.kw_defaults, strict=True) if default is None]
    return Signature(
        tuple(positional),
        len(args.posonlyargs),
        frozenset(keyword_only),
        frozenset(required),
        args.vararg is not None,
        args.kwarg is not None,
    )


def of_method(function: Function) -> Signature | None:
    """The signature as a caller of `self.method` or `super().method` sees it."""
    signature = of_function(function)
    static = any(_decorator(d) == "staticmethod" for d in function.node.decorator_list)
    return signature if static or signature is None else signature.bound()


def of_constructor(symbols: Symbols, cls: Class) -> Signature | None:
    """What calling the class takes, or None when the snapshot cannot tell."""
    lineage = list(symbols.bases(cls))
    for base in lineage:
        if isinstance(base, Unknown) or base.node.keywords:
            return None
        decorators = {_decorator(d) for d in base.node.decorator_list}
        own = {n.name for n in base.node.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))}
        if "__new__" in own or decorators - {"dataclass"}:
            return None
        if "__init__" in own:
            init = symbols.member(base, "__init__")
            return of_method(init) if isinstance(init, Function) else None
        if "dataclass" in decorators:
            return _of_dataclass(symbols, base)
    return Signature((), 0, frozenset(), frozenset())


def of_callee(symbols: Symbols, callee: object) -> Signature | None:
    """The signature of a function or class that is called by its name; None for anything else."""
    if isinstance(callee, Function):
        return of_function(callee)
    return of_constructor(symbols, callee) if isinstance(callee, Class) else None


def _of_dataclass(symbols: Symbols, cls: Class) -> Signature | None:
    fields: dict[str, bool] = {}
    keyword_only: set[str] = set()
    for base in reversed(list(symbols.bases(cls))):
        if isinstance(base, Unknown):
            return None
        flags = [d for d in base.node.decorator_list if _decorator(d) == "dataclass"]
        if not flags:
            continue
        all_by_name = any(_is_true(d, "kw_only") for d in flags)
        for statement in base.node.body:
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            kind = ast.unparse(statement.annotation)
            name, value = statement.target.id, statement.value
            if kind.startswith(("ClassVar", "typing.ClassVar")) or _has(value, "init", False):
                continue
            if kind in ("KW_ONLY", "dataclasses.KW_ONLY"):
                all_by_name = True
                continue
            fields[name] = _has_default(value)
            if all_by_name or _has(value, "kw_only", True):
                keyword_only.add(name)
    positional = tuple(name for name in fields if name not in keyword_only)
    required = frozenset(name for name, default in fields.items() if not default)
    return Signature(positional, 0, frozenset(keyword_only), required)


def _has_default(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call) and _decorator(value) == "field":
        return any(k.arg in ("default", "default_factory") for k in value.keywords)
    return value is not None


def _has(value: ast.expr | None, keyword: str, wanted: bool) -> bool:
    if not isinstance(value, ast.Call):
        return False
    return any(
        k.arg == keyword and isinstance(k.value, ast.Constant) and k.value.value is wanted for k in value.keywords
    )


def _is_true(decorator: ast.expr, keyword: str) -> bool:
    return _has(decorator, keyword, True)


def _decorator(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        node = node.func
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else "?"
