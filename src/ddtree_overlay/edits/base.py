# SPDX-License-Identifier: Apache-2.0
"""Edits as data: an `Edit` is what the overlay inserts into one upstream file, made of named insertions.

An insertion only ever adds whole statements between two upstream statements, so every upstream line survives. It is
undone the same way: the statements at its anchor must be exactly the inserted ones, and are taken out. Nothing in the
file marks them; the edit itself is the record, which is why `Edit.remove` needs no copy of the base.

Insertions are applied in order and removed in reverse order, so several of them may share an anchor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from ddtree_overlay.edits.anchors import (
    After,
    AfterLastMember,
    AfterMethod,
    Anchor,
    AnchorError,
    Spot,
    find_spot,
)
from ddtree_overlay.edits.hollow import hollow
from ddtree_overlay.edits.tree import parse, replace_block
from ddtree_overlay.errors import OverlayError


if TYPE_CHECKING:
    import libcst as cst
else:
    from ddtree_overlay.edits.lazy import cst


@dataclass(frozen=True, slots=True)
class Insertion:
    """Statements that go to one gap of one scope. Use one of the named pieces below to make one.

    Args:
        scope: Dotted name of the class or function, `ServerArgs.add_cli_args`.
        anchor: The gap.
        code: The statements as black would print them at module level; ASCII.
        reason: One sentence: why the file needs them.
        blank_before: Blank lines above the code.
        blank_after: Blank lines below the code; a statement must follow.
    """

    scope: str
    anchor: Anchor
    code: str
    reason: str
    blank_before: int = 0
    blank_after: int = 0

    def moved(self, anchor: Anchor, *, scope: str | None = None, renamed: Mapping[str, str] | None = None) -> Insertion:
        """The same insertion for a release in which its place moved.

        Args:
            anchor: The gap there.
            scope: The class or function there; default: the same.
            renamed: Names that the new place gives to what the code uses, whole words: `{"self": "server_args"}`.
        """
        code = self.code
        for name, new in (renamed or {}).items():
            code = re.sub(rf"\b{re.escape(name)}\b", new, code)
        return replace(self, anchor=anchor, scope=scope or self.scope, code=code)

    def insert(self, module: cst.Module, path: str) -> cst.Module:
        """`module` with the code inserted.

        Raises:
            AnchorError: The anchor is not exactly one place.
        """
        spot = find_spot(module, self.scope, self.anchor, path)
        self._refuse_adoption(spot, path)
        body = list(spot.block.body)
        body[spot.index : spot.index] = self._nodes()
        if self.blank_after:
            self._pad(body, spot.index + len(self._nodes()), path)
        return replace_block(module, spot.block, spot.block.with_changes(body=body))

    def remove(self, module: cst.Module, path: str) -> cst.Module | None:
        """`module` without the code, or None when the code is not at the anchor.

        Raises:
            AnchorError: The anchor is not exactly one place.
        """
        spot = find_spot(module, self.scope, self.anchor, path)
        count = len(self._nodes())
        start = spot.index - count if self.anchor.inserted_above else spot.index
        if start < 0 or not self._is_at(module, spot, start):
            return None
        body = list(spot.block.body)
        del body[start : start + count]
        if self.blank_after:
            following = body[start]
            body[start] = following.with_changes(
                leading_lines=getattr(following, "leading_lines", ())[self.blank_after :]
            )
        return replace_block(module, spot.block, spot.block.with_changes(body=body))

    def _is_at(self, module: cst.Module, spot: Spot, start: int) -> bool:
        nodes = self._nodes()
        present: Sequence[cst.CSTNode] = spot.block.body[start : start + len(nodes)]
        if len(present) != len(nodes):
            return False
        if any(module.code_for_node(a) != module.code_for_node(b) for a, b in zip(present, nodes, strict=True)):
            return False
        if not self.blank_after:
            return True
        following = spot.block.body[start + len(nodes) : start + len(nodes) + 1]
        lines = [line for node in following for line in getattr(node, "leading_lines", ())][: self.blank_after]
        return len(lines) == self.blank_after and all(_is_blank(line) for line in lines)

    def _nodes(self) -> tuple[cst.BaseStatement, ...]:
        return _parsed(self.code, self.blank_before)

    def _refuse_adoption(self, spot: Spot, path: str) -> None:
        """Refuse a gap above a comment that is indented like the inside of the code: it would become part of it."""
        lines = getattr(spot.block.body[spot.index], "leading_lines", ()) if spot.index < len(spot.block.body) else ()
        lines = lines or getattr(spot.block, "footer", ())
        ends_indented = not isinstance(self._nodes()[-1], cst.SimpleStatementLine)
        if ends_indented and any(line.comment and line.indent and line.whitespace.value for line in lines):
            problem = "a comment below the gap is indented deeper than its statement"
            raise AnchorError(path, self.scope, self.anchor.text, problem)

    def _pad(self, body: list[cst.BaseStatement], index: int, path: str) -> None:
        if index >= len(body):
            raise AnchorError(path, self.scope, self.anchor.text, "no statement follows the gap")
        following = body[index]
        lines = (*_blank(self.blank_after), *getattr(following, "leading_lines", ()))
        body[index] = following.with_changes(leading_lines=lines)


def insert_statements(
    scope: str, anchor: Anchor, code: str, *, reason: str, blank_before: int = 0, blank_after: int = 0
) -> Insertion:
    """Statements at a gap of a function."""
    return Insertion(scope, anchor, code, reason, blank_before, blank_after)


def add_enum_member(scope: str, name: str, *, reason: str) -> Insertion:
    """A member behind the last one of an `auto()` enum."""
    return Insertion(scope, AfterLastMember(), f"{name} = auto()\n", reason)


def add_field(scope: str, fields: Sequence[str], *, after: str, reason: str) -> Insertion:
    """Annotated fields of a dataclass, behind the field `after`."""
    return Insertion(scope, After(f"{after}: ... = ..."), "".join(f"{field}\n" for field in fields), reason)


def add_method(scope: str, code: str, *, after: str, reason: str) -> Insertion:
    """A method behind the method `after`."""
    return Insertion(scope, AfterMethod(after), code, reason, blank_before=1)


@dataclass(frozen=True, slots=True)
class Example:
    """One small file before and after an edit, byte for byte."""

    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Edit:
    """Everything that is inserted into one upstream file.

    Args:
        path: Package-relative POSIX path.
        summary: One sentence for the header of the review patch.
        insertions: Applied in this order.
        examples: Before/after pairs; the tests prove each of them.
    """

    path: str
    summary: str
    insertions: tuple[Insertion, ...]
    examples: tuple[Example, ...] = ()

    def apply(self, data: bytes) -> bytes:
        """The file with every insertion present exactly once; its own output comes back unchanged.

        Raises:
            AnchorError: An insertion has no single place.
        """
        return self.plan(data)[0]

    def remove(self, data: bytes) -> bytes:
        """The upstream bytes that `apply` was given.

        Raises:
            AnchorError: An insertion is not there, or was changed.
        """
        return self._short(data, self._remove)

    def plan(self, data: bytes) -> tuple[bytes, tuple[Insertion, ...]]:
        """What `apply` gives, and the insertions that were there before, from a single parse."""
        present: list[tuple[Insertion, ...]] = []

        def change(part: bytes) -> bytes:
            module, missing = self._without(parse(part, self.path))
            for insertion in self.insertions:
                module = insertion.insert(module, self.path)
            present.append(tuple(i for i in self.insertions if i not in missing))
            return module.bytes

        changed = self._short(data, change)
        return changed, present[-1]

    def fits(self, data: bytes) -> bool:
        """Whether every insertion has its place in a file."""
        try:
            part, _ = hollow(data, self._looked_at())
            return not self.misfits(part)
        except (SyntaxError, ValueError):
            return not self.misfits(data)

    def misfits(self, data: bytes) -> tuple[tuple[Insertion, AnchorError], ...]:
        """Each insertion that has no single place in a file, and why.

        Raises:
            OverlayError: The file cannot be parsed.
        """
        module = parse(data, self.path)
        found = []
        for insertion in self.insertions:
            try:
                # Into the file as it is, so that lines are those of the file.
                insertion.insert(module, self.path)
            except AnchorError as error:
                found.append((insertion, error))
        return tuple(found)

    def _short(self, data: bytes, change: Callable[[bytes], bytes]) -> bytes:
        """What `change` makes of the file, made of the little that the edit looks at.

        Where that is refused, the whole file is refused: its message has the lines as they are in the file.
        """
        try:
            part, filled = hollow(data, self._looked_at())
            return filled(change(part))
        except (OverlayError, SyntaxError, ValueError):
            return change(data)

    def _looked_at(self) -> frozenset[str]:
        """The scopes that code is inserted into, and the functions that are inserted."""
        names = {insertion.scope for insertion in self.insertions}
        for insertion in self.insertions:
            names |= {f"{insertion.scope}.{name}" for name in re.findall(r"^def (\w+)", insertion.code, re.MULTILINE)}
        return frozenset(names)

    def _remove(self, data: bytes) -> bytes:
        module, missing = self._without(parse(data, self.path))
        if missing:
            gone = missing[0]
            raise AnchorError(self.path, gone.scope, gone.code.splitlines()[0], "inserted code is missing or changed")
        return module.bytes

    def _without(self, module: cst.Module) -> tuple[cst.Module, list[Insertion]]:
        missing: list[Insertion] = []
        for insertion in reversed(self.insertions):
            removed = insertion.remove(module, self.path)
            if removed is None:
                missing.insert(0, insertion)
            else:
                module = removed
        return module, missing


@cache
def _parsed(code: str, blank_before: int) -> tuple[cst.BaseStatement, ...]:
    # Parsed with "\n" and four spaces, which libcst stores as "the file's default": the code then follows the newline
    # and indent style of the file it is put into.
    code.encode("ascii")
    module = cst.parse_module(code)
    first, *rest = module.body
    head = (*_blank(blank_before), *module.header, *first.leading_lines)
    nodes = [first.with_changes(leading_lines=_flat(head))]
    nodes += [node.with_changes(leading_lines=_flat(node.leading_lines)) for node in rest]
    return tuple(nodes)


def _flat(lines: Sequence[cst.EmptyLine]) -> tuple[cst.EmptyLine, ...]:
    """`lines` with blank ones that carry no indentation, whatever block they are put into."""
    return tuple(line.with_changes(indent=False) if _is_blank(line) else line for line in lines)


def _blank(count: int) -> tuple[cst.EmptyLine, ...]:
    return tuple(cst.EmptyLine(indent=False) for _ in range(count))


def _is_blank(line: cst.EmptyLine) -> bool:
    return line.comment is None and not line.whitespace.value
