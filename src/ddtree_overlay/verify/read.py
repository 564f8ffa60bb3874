# SPDX-License-Identifier: Apache-2.0
"""Which functions of SGLang have to be in `mirrors`, as far as a program can tell: those overridden or cut short.

A method of ours may come to override one that a new release adds, and what an insertion returns may be less than what
the rest of the function has learnt to do. So somebody has to read them. What the overlay only has its own version of,
no program finds: such functions are in the tables because whoever wrote that version has put them there.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping

from ddtree_overlay.edits.base import Edit
from ddtree_overlay.verify.definitions import FunctionNode
from ddtree_overlay.verify.findings import Finding
from ddtree_overlay.verify.hooks import bound_names, occurrences
from ddtree_overlay.verify.mentions import Place
from ddtree_overlay.verify.mirrors import digest_of
from ddtree_overlay.verify.symbols import Class, Symbols


def check_read(
    mirrors: Collection[Place],
    symbols: Symbols,
    edits: Collection[Edit],
    added: Collection[str],
    base: Mapping[str, bytes],
) -> list[Finding]:
    """A finding for each function that the overlay overrides or cuts short and that is not among `mirrors`.

    Args:
        mirrors: Functions that somebody has read.
        symbols: The snapshot with the overlay laid over it.
        edits: The release's.
        added: Paths of the overlay's modules.
        base: The snapshot's files.
    """
    ways = dict.fromkeys(overridden(symbols, added), "overrides it")
    for edit in edits:
        ways |= dict.fromkeys(cut_short(symbols, edit), "returns from it, or sets a name of it")
    return [
        Finding(
            "mirrors",
            "error",
            place.path,
            None,
            f"nobody has read {place.scope}, as far as the table says, and the overlay {way}: read it, follow where "
            f"that is needed, and note the digest {digest_of(base.get(place.path, b''), place.scope)}",
        )
        for place, way in sorted(ways.items())
        if place not in mirrors
    ]


def overridden(symbols: Symbols, added: Collection[str]) -> frozenset[Place]:
    """Methods of SGLang's classes that a class of ours has its own version of.

    A version that does nothing but call SGLang's is none. Of several bases that have the method the nearest counts.
    """
    found = set()
    for heir in (Class(path, n) for path in added for n in symbols.tree(path).body if isinstance(n, ast.ClassDef)):
        line = [cls for cls in symbols.bases(heir) if isinstance(cls, Class)]
        ours = {name for cls in line if cls.path in added for name, node in _methods(cls) if not _passes_on(node)}
        nearest: dict[str, Class] = {}
        for cls in line:
            if cls.path not in added:
                for name, _ in _methods(cls):
                    nearest.setdefault(name, cls)
        found |= {Place(nearest[name].path, f"{nearest[name].node.name}.{name}") for name in ours & nearest.keys()}
    return frozenset(found)


def cut_short(symbols: Symbols, edit: Edit) -> frozenset[Place]:
    """Functions that inserted statements return from, or of which they set a name that is there already."""
    found = set()
    for insertion in edit.insertions:
        for occurrence in occurrences(symbols.tree(edit.path), insertion):
            owner, statements = occurrence.owner, occurrence.statements
            if not isinstance(owner, FunctionNode):
                continue
            returns = any(isinstance(node, ast.Return) for node in _within(statements))
            names = {name for statement in statements for name in bound_names(statement)}
            if returns or names & set(_names_before(owner, statements[0].lineno)):
                found.add(Place(edit.path, occurrence.scope))
    return frozenset(found)


def _methods(cls: Class) -> Iterator[tuple[str, FunctionNode]]:
    return ((node.name, node) for node in cls.node.body if isinstance(node, FunctionNode))


def _passes_on(node: FunctionNode) -> bool:
    """Whether a method is one call of the one that it overrides, docstring aside."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    call = getattr(body[0], "value", None) if len(body) == 1 else None
    function = call.func if isinstance(call, ast.Call) else None
    if not isinstance(function, ast.Attribute) or function.attr != node.name:
        return False
    owner = function.value
    return isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name) and owner.func.id == "super"


def _within(statements: Collection[ast.stmt]) -> Iterator[ast.AST]:
    """Every node of some statements, without those inside functions and classes that they define."""
    nodes: list[ast.AST] = list(statements)
    while nodes:
        node = nodes.pop()
        yield node
        if not isinstance(node, (ast.ClassDef, FunctionNode, ast.Lambda)):
            nodes += ast.iter_child_nodes(node)


def _names_before(function: FunctionNode, line: int) -> Iterator[str]:
    """Arguments, and what is bound above a line."""
    yield from (node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg))
    for statement in function.body:
        yield from bound_names(statement, before=line)
