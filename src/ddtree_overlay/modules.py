# SPDX-License-Identifier: Apache-2.0
"""Package-relative paths and dotted names of SGLang modules, and what a module imports from SGLang."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass


PACKAGE = "sglang"


@dataclass(frozen=True, slots=True)
class Import:
    """One name that an `import` statement binds.

    Args:
        module: Absolute dotted name of the module that is imported (from).
        name: The name taken from it; None for `import module`, "*" for all.
        bound: The local name.
        line: Where.
    """

    module: str
    name: str | None
    bound: str
    line: int


def module_of(path: str) -> str:
    """Dotted name of the module at a package-relative path."""
    parts = path.removesuffix(".py").split("/")
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join((PACKAGE, *parts))


def paths_of(module: str) -> tuple[str, ...]:
    """Where a module may be: as a file, and as a package."""
    inner = module.split(".")[1:]
    if not inner:
        return ("__init__.py",)
    return "/".join(inner) + ".py", "/".join((*inner, "__init__.py"))


def is_sglang(module: str) -> bool:
    """Whether a dotted name lies in the package."""
    return module == PACKAGE or module.startswith(PACKAGE + ".")


def imports(tree: ast.AST, path: str) -> Iterator[Import]:
    """Every name that the module at `path` takes from SGLang, at any depth, relative imports resolved."""
    here = module_of(path).split(".")
    package = here if path.endswith("__init__.py") else here[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if is_sglang(alias.name):
                    yield Import(alias.name, None, alias.asname or PACKAGE, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                source = ".".join((*package[: len(package) - node.level + 1], *filter(None, [source])))
            if is_sglang(source):
                for alias in node.names:
                    yield Import(source, alias.name, alias.asname or alias.name, node.lineno)
