# SPDX-License-Identifier: Apache-2.0
"""Reading and rebuilding libcst trees: bytes in, bytes out, and only along the path that changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ddtree_overlay.errors import OverlayError


if TYPE_CHECKING:
    import libcst as cst
else:
    from ddtree_overlay.edits.lazy import cst


Block: TypeAlias = "cst.Module | cst.IndentedBlock"
Scope: TypeAlias = "cst.ClassDef | cst.FunctionDef"
_Node = TypeVar("_Node", bound="cst.CSTNode")

#: Fields of a compound statement that hold a block, or a clause that holds one.
_CHILDREN = ("body", "handlers", "cases", "orelse", "finalbody")


def parse(data: bytes, path: str) -> cst.Module:
    """Parse a file without losing a byte (newline style, BOM, encoding cookie, missing final newline).

    Raises:
        OverlayError: The file is no Python that can be edited without loss.
    """
    try:
        module = cst.parse_module(data)
    except Exception as error:
        raise OverlayError(f"{path}: cannot be parsed", why=str(error).strip()) from error
    except BaseException as error:
        # libcst's parser reports some inputs (LibCST#901) as a PanicException, which is no Exception.
        if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
            raise
        raise OverlayError(f"{path}: cannot be parsed", why=f"the parser gave up: {error}") from error
    if module.bytes != data:
        raise OverlayError(
            f"{path}: cannot be edited without changing other bytes",
            why="its line endings or its last line are of a kind that would be lost",
        )
    return module


def body_of(scope: cst.Module | Scope) -> Block | None:
    """The statement list of a scope, or None when it is written on the line of its header."""
    if isinstance(scope, cst.Module):
        return scope
    return scope.body if isinstance(scope.body, cst.IndentedBlock) else None


def blocks_of(scope: cst.Module | Scope) -> Iterator[Block]:
    """Every statement list of a scope at any depth, without those of functions and classes defined inside it."""
    if isinstance(scope, cst.Module):
        yield scope
        nodes: list[cst.CSTNode] = list(scope.body)
    else:
        nodes = [scope.body]
    while nodes:
        node = nodes.pop(0)
        if isinstance(node, cst.IndentedBlock):
            yield node
            nodes = [s for s in node.body if not isinstance(s, (cst.ClassDef, cst.FunctionDef))] + nodes
        elif not isinstance(node, (cst.ClassDef, cst.FunctionDef)):
            nodes = list(_children(node)) + nodes


def replace_block(node: _Node, old: Block, new: Block) -> _Node:
    """`node` with one block exchanged; everything beside the path to it is the same object as before."""
    if node is old:
        return new  # type: ignore[return-value]
    for name in ("body", *_CHILDREN[1:]):
        value = getattr(node, name, None)
        if isinstance(value, cst.CSTNode):
            changed = replace_block(value, old, new)
            if changed is not value:
                return node.with_changes(**{name: changed})
        elif isinstance(value, (tuple, list)):
            for i, item in enumerate(value):
                changed = replace_block(item, old, new)
                if changed is not item:
                    return node.with_changes(**{name: (*value[:i], changed, *value[i + 1 :])})
    return node


def is_docstring(node: cst.CSTNode) -> bool:
    """Whether a statement is a lone string."""
    if not isinstance(node, cst.SimpleStatementLine) or len(node.body) != 1:
        return False
    expression = node.body[0]
    return isinstance(expression, cst.Expr) and isinstance(expression.value, (cst.SimpleString, cst.ConcatenatedString))


def first_line(module: cst.Module, node: cst.CSTNode) -> str:
    """The first line of code of a statement, without comments above it."""
    bare = node.with_changes(leading_lines=()) if hasattr(node, "leading_lines") else node
    lines = module.code_for_node(bare).split("\n")
    return lines[0].strip() + (" ..." if len(lines) > 2 else "")


def line_of(module: cst.Module, node: cst.CSTNode) -> int:
    """The line of a node of `module`. Slow (it resolves every position): for messages only."""
    position = _positions(module).get(node)
    return position.start.line if position else 0


@lru_cache(maxsize=1)
def _positions(module: cst.Module) -> Mapping[cst.CSTNode, Any]:
    from libcst.metadata import MetadataWrapper, PositionProvider

    return MetadataWrapper(module, unsafe_skip_copy=True).resolve(PositionProvider)


def _children(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    for name in _CHILDREN:
        value = getattr(node, name, None)
        if isinstance(value, cst.CSTNode):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from value
