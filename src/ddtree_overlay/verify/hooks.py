# SPDX-License-Identifier: Apache-2.0
"""Check `hooks`: every insertion is there exactly once, where it belongs, reached, and sees the names it uses."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from dataclasses import dataclass

from ddtree_overlay.edits.base import Edit, Insertion
from ddtree_overlay.verify.definitions import FunctionNode
from ddtree_overlay.verify.findings import Finding


@dataclass(frozen=True, slots=True)
class Occurrence:
    """Inserted statements found in a patched file.

    Args:
        scope: Dotted name of the class or function around them.
        owner: Its node; the module when there is none.
        statements: The statements.
        reached: Whether control can get there: not behind a `return`, not under `if False`.
    """

    scope: str
    owner: ast.Module | ast.ClassDef | FunctionNode
    statements: tuple[ast.stmt, ...]
    reached: bool


def occurrences(tree: ast.Module, insertion: Insertion) -> list[Occurrence]:
    """Every place of a file where the statements of an insertion stand, layout and comments aside."""
    wanted = ast.parse(insertion.code).body
    found = []
    for body, scope, owner, alive in _bodies(tree.body, "", tree, alive=True):
        for i in range(len(body) - len(wanted) + 1):
            if not all(map(_same, body[i : i + len(wanted)], wanted)):
                continue
            reached = alive and not any(_ends(node) for node in body[:i])
            found.append(Occurrence(scope, owner, tuple(body[i : i + len(wanted)]), reached))
    return found


def _same(one: object, other: object) -> bool:
    """Whether two parts of syntax trees are the same code; unlike a comparison of dumps, it ends at a difference."""
    if type(one) is not type(other):
        return False
    if isinstance(one, ast.AST):
        return all(_same(getattr(one, name, None), getattr(other, name, None)) for name in one._fields)
    if isinstance(one, list):
        assert isinstance(other, list)
        return len(one) == len(other) and all(map(_same, one, other))
    return one == other


def check_hooks(edit: Edit, tree: ast.Module) -> list[Finding]:
    """A finding for each insertion of one file that is missing, doubled, misplaced, dead or blind."""
    findings: list[Finding] = []
    for insertion in edit.insertions:
        found = occurrences(tree, insertion)
        line = found[-1].statements[0].lineno if found else None
        problems = [f"is there {len(found)} times"] if len(found) != 1 else list(_problems(insertion, found[0], tree))
        code = insertion.code.splitlines()[0]
        findings += [
            Finding("hooks", "error", edit.path, line, f"inserted code of {insertion.scope} {problem}: {code}")
            for problem in problems
        ]
    return findings


def _problems(insertion: Insertion, found: Occurrence, tree: ast.Module) -> Iterator[str]:
    if found.scope != insertion.scope:
        yield f"stands in {found.scope or 'the module'} instead"
    if not found.reached:
        yield "is never reached"
    if sum(scope == insertion.scope for scope, _ in _scopes(tree.body, "")) > 1:
        yield "may be hidden, its scope is defined twice"
    unseen = sorted(_used(found.statements) - _visible(found, tree))
    if unseen:
        yield f"uses {', '.join(unseen)}, which nothing before it defines"


def _bodies(
    body: list[ast.stmt], scope: str, owner: ast.Module | ast.ClassDef | FunctionNode, *, alive: bool
) -> Iterator[tuple[list[ast.stmt], str, ast.Module | ast.ClassDef | FunctionNode, bool]]:
    yield body, scope, owner, alive
    for node in body:
        if isinstance(node, (ast.ClassDef, FunctionNode)):
            yield from _bodies(node.body, f"{scope}.{node.name}".lstrip("."), node, alive=True)
        else:
            for name in ("body", "orelse", "finalbody"):
                inner = getattr(node, name, [])
                if inner:
                    yield from _bodies(inner, scope, owner, alive=alive and not (name == "body" and _never(node)))
            for clause in (*getattr(node, "handlers", []), *getattr(node, "cases", [])):
                yield from _bodies(clause.body, scope, owner, alive=alive)
        alive = alive and not _ends(node)


def _scopes(body: list[ast.stmt], scope: str) -> Iterator[tuple[str, ast.stmt]]:
    for node in body:
        if isinstance(node, (ast.ClassDef, FunctionNode)):
            name = f"{scope}.{node.name}".lstrip(".")
            yield name, node
            if isinstance(node, ast.ClassDef):
                yield from _scopes(node.body, name)


def _ends(node: ast.stmt) -> bool:
    """Whether nothing behind the statement runs."""
    if isinstance(node, (ast.Return, ast.Raise, ast.Break, ast.Continue)):
        return True
    if isinstance(node, ast.If):
        return bool(node.orelse) and any(map(_ends, node.body)) and any(map(_ends, node.orelse))
    return isinstance(node, ast.With) and any(map(_ends, node.body))


def _never(node: ast.stmt) -> bool:
    if not isinstance(node, (ast.If, ast.While)):
        return False
    test = node.test
    return (isinstance(test, ast.Constant) and not test.value) or (
        isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"
    )


def _used(statements: tuple[ast.stmt, ...]) -> frozenset[str]:
    used: set[str] = set()
    for statement in statements:
        # A function sees its own names as well; what its annotations name has to be there when it is defined.
        own = set(_own_names(statement)) if isinstance(statement, FunctionNode) else set()
        nodes = list(ast.walk(statement))
        used |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)} - own
    return frozenset(used) - frozenset(name for s in statements for name in bound_names(s))


def _own_names(function: FunctionNode) -> Iterator[str]:
    yield from (node.arg for node in ast.walk(function) if isinstance(node, ast.arg))
    yield from (name for statement in function.body for name in bound_names(statement))


def _visible(found: Occurrence, tree: ast.Module) -> frozenset[str]:
    names = set(dir(builtins))
    for statement in tree.body:
        names.update(bound_names(statement))
    line = found.statements[0].lineno
    if isinstance(found.owner, FunctionNode):
        args = found.owner.args
        names |= {a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg) if a}
    for statement in found.owner.body:
        names.update(bound_names(statement, before=line))
    return frozenset(names)


def bound_names(statement: ast.stmt, *, before: int | None = None) -> Iterator[str]:
    """Names that a statement binds, without those inside functions and classes it defines.

    Args:
        statement: Any statement.
        before: Leave out what is bound on this line or later.
    """
    nodes: list[ast.AST] = [statement]
    while nodes:
        node = nodes.pop()
        if before is not None and getattr(node, "lineno", 0) >= before:
            continue
        if isinstance(node, (ast.ClassDef, FunctionNode)):
            yield node.name
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from ((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name
        nodes += ast.iter_child_nodes(node)
