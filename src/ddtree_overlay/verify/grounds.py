# SPDX-License-Identifier: Apache-2.0
"""Check `grounds`: what a site is said to be edited or refused by is there.

A row's `by` names

- an edit: `PATH SCOPE`, where the release's edit of that file has an insertion in that scope;
- a gate of the overlay: `MODULE.NAME`, a function or constant of `srt/speculative/ddtree/MODULE.py` that something else
  of the overlay uses; with an entry behind it (`args._WHY_NOT fa3`), a string that the definition holds;
- an attention backend that no target may have: `backend NAME`, as long as `proven.TREE_ATTENTION_BACKENDS` lacks it;
- a gate of SGLang itself: `sglang PATH SCOPE`, a function that the release has.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping

from ddtree_overlay.releases import Release
from ddtree_overlay.verify.findings import Finding
from ddtree_overlay.verify.tables import Site


_FOLDER = "srt/speculative/ddtree"


def check_grounds(sites: Collection[Site], row: Release, files: Mapping[str, bytes]) -> list[Finding]:
    """A finding for each row whose edit or gate does not exist.

    Args:
        sites: The table.
        row: The release, with its edits.
        files: The patched files and the overlay's modules laid over the snapshot's.
    """
    findings = []
    seen: dict[str, str | None] = {}
    for site in sites:
        by = site.by or (f"{site.path} {site.scope}" if site.verdict == "edited" else None)
        if by is None:
            continue
        if by not in seen:
            seen[by] = _edit_problem(by, row) if site.verdict == "edited" else _gate_problem(by, files)
        if seen[by]:
            message = f"{site.scope} is {site.verdict} by `{by}`: {seen[by]}"
            findings.append(Finding("grounds", "error", site.path, None, message))
    count = sum(problem is None for problem in seen.values())
    return [*findings, Finding("grounds", "info", "", None, f"{count} edits and gates that sites rely on are there")]


def _edit_problem(by: str, row: Release) -> str | None:
    path, _, scope = by.partition(" ")
    edit = row.edit(path)
    if edit is None:
        return "the release has no edit of that file"
    if scope not in {insertion.scope for insertion in edit.insertions}:
        return "no insertion is in that scope"
    return None


def _gate_problem(by: str, files: Mapping[str, bytes]) -> str | None:
    name, _, entry = by.partition(" ")
    if name == "sglang":
        path, _, scope = entry.partition(" ")
        if path not in files:
            return f"{path} is not in the snapshot"
        return None if scope in set(_scopes(ast.parse(files[path]).body, "")) else "SGLang has no such function"
    if name == "backend":
        admitted = _definition(ast.parse(files.get(f"{_FOLDER}/proven.py", b"")), "TREE_ATTENTION_BACKENDS")
        return f"targets may have {entry}" if admitted is None or entry in _strings(admitted) else None
    module, _, name = name.partition(".")
    path = f"{_FOLDER}/{module}.py"
    definition = _definition(ast.parse(files.get(path, b"")), name)
    if definition is None:
        return f"{path} of the overlay does not define {name}"
    if entry and entry not in _strings(definition):
        return f"{name} has no entry {entry!r}"
    return None if _is_used(name, definition, files) else f"nothing uses {name}"


def _strings(node: ast.stmt) -> set[object]:
    return {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}


def _definition(tree: ast.Module, name: str) -> ast.stmt | None:
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return node
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return node
    return None


def _is_used(name: str, definition: ast.stmt, files: Mapping[str, bytes]) -> bool:
    inside = {id(node) for node in ast.walk(definition)}
    for path, data in files.items():
        if name.encode() not in data:
            continue
        # Outside the overlay's own modules the name is there by an insertion.
        if not path.startswith(_FOLDER):
            return True
        for node in ast.walk(ast.parse(data)):
            used = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None
            if used == name and isinstance(getattr(node, "ctx", None), ast.Load) and id(node) not in inside:
                return True
    return False


def _scopes(body: list[ast.stmt], scope: str) -> Iterator[str]:
    for node in body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            name = f"{scope}.{node.name}".lstrip(".")
            yield name
            yield from _scopes(node.body, name)
