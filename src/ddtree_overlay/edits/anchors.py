# SPDX-License-Identifier: Apache-2.0
"""Where an insertion goes: anchors that match exactly one place of a scope, and the refusal when they do not."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ddtree_overlay.edits.patterns import matches, pattern
from ddtree_overlay.edits.tree import Block, Scope, blocks_of, body_of, first_line, is_docstring, line_of
from ddtree_overlay.errors import OverlayError


if TYPE_CHECKING:
    import libcst as cst
    import libcst.matchers as m
else:
    from ddtree_overlay.edits.lazy import cst, m


class AnchorError(OverlayError):
    """An edit does not fit the file: its anchor is missing, ambiguous, or somewhere nothing can be inserted.

    Args:
        path: Package-relative path of the file.
        scope: Dotted name of the class or function that was searched.
        wanted: What was looked for.
        problem: Why that is no single place.
        places: (line, text) of every ambiguous place, or of the nearest candidates.
    """

    def __init__(
        self, path: str, scope: str, wanted: str, problem: str, places: Sequence[tuple[int, str]] = ()
    ) -> None:
        self.path = path
        self.scope = scope
        self.wanted = wanted
        self.problem = problem
        self.places = tuple(places)
        shown = "; ".join(f"line {line}: {text}" for line, text in self.places)
        super().__init__(
            f"{path}{_lines(self.places)}: {problem}: `{wanted}` in {scope}",
            why=shown or "nothing in that scope looks like it",
            next_step="ddtree-overlay snapshot {target}  # names the files that are not as they were published",
        )


@dataclass(frozen=True, slots=True)
class Spot:
    """A gap between statements: before `block.body[index]`."""

    block: Block
    index: int


class Anchor(Protocol):
    """Finds the gaps that an insertion may mean; a usable anchor finds exactly one."""

    @property
    def text(self) -> str:
        """What is looked for, as shown to a person."""

    @property
    def inserted_above(self) -> bool:
        """Whether inserted statements end at the gap once they are there (else they start at it)."""

    def spots(self, scope: Scope) -> list[Spot]:
        """Every gap of `scope` that fits."""


@dataclass(frozen=True, slots=True)
class After:
    """The gap behind the one statement, at any depth of the scope, that matches a pattern (see `patterns`)."""

    text: str
    inserted_above = False

    def spots(self, scope: Scope) -> list[Spot]:
        """Every gap of `scope` that fits."""
        wanted = pattern(self.text)
        return [
            Spot(block, i + 1)
            for block in blocks_of(scope)
            for i, node in enumerate(block.body)
            if matches(node, wanted)
        ]


@dataclass(frozen=True, slots=True)
class Before:
    """The gap in front of the one statement, at any depth of the scope, that matches a pattern."""

    text: str
    inserted_above = True

    def spots(self, scope: Scope) -> list[Spot]:
        """Every gap of `scope` that fits."""
        return [Spot(s.block, s.index - 1) for s in After(self.text).spots(scope)]


@dataclass(frozen=True, slots=True)
class AtStart:
    """The gap in front of the first statement of a body, below its docstring."""

    text = "the start of the body"
    inserted_above = False

    def spots(self, scope: Scope) -> list[Spot]:
        """Every gap of `scope` that fits."""
        body = body_of(scope)
        if body is None:
            return []
        return [Spot(body, 1 if body.body and is_docstring(body.body[0]) else 0)]


@dataclass(frozen=True, slots=True)
class AfterLastMember:
    """The gap behind the last `NAME = auto()` of an enum: members that exist keep their values."""

    text = "NAME = auto()"
    inserted_above = True

    def spots(self, scope: Scope) -> list[Spot]:
        """Every gap of `scope` that fits."""
        body = body_of(scope)
        if body is None:
            return []
        member = m.SimpleStatementLine(body=[m.Assign(value=m.Call(func=m.Name("auto")))])
        found = [i for i, node in enumerate(body.body) if m.matches(node, member)]
        return [Spot(body, found[-1] + 1)] if found else []


@dataclass(frozen=True, slots=True)
class AfterMethod:
    """The gap behind the method of that name."""

    name: str
    inserted_above = False

    @property
    def text(self) -> str:
        """What is looked for, as shown to a person."""
        return f"def {self.name}"

    def spots(self, scope: Scope) -> list[Spot]:
        """Every gap of `scope` that fits."""
        body = body_of(scope)
        if body is None:
            return []
        return [
            Spot(body, i + 1)
            for i, node in enumerate(body.body)
            if isinstance(node, cst.FunctionDef) and node.name.value == self.name
        ]


def find_scope(module: cst.Module, name: str, path: str) -> Scope:
    """The class or function with the dotted `name`.

    Raises:
        AnchorError: There is none, or more than one.
    """
    scope: cst.Module | Scope = module
    for part in name.split("."):
        body = body_of(scope)
        named = [s for s in (body.body if body else ()) if isinstance(s, (cst.ClassDef, cst.FunctionDef))]
        found = [s for s in named if s.name.value == part]
        if len(found) != 1:
            kind = "defined more than once" if found else "no such class or function"
            near = found or _nearest(part, [(s, s.name.value) for s in named])
            raise AnchorError(path, name, part, kind, _places(module, near))
        scope = found[0]
    assert not isinstance(scope, cst.Module)
    return scope


def find_spot(module: cst.Module, scope_name: str, anchor: Anchor, path: str) -> Spot:
    """The one gap that `anchor` means in the scope.

    Raises:
        AnchorError: There is none, or more than one.
    """
    scope = find_scope(module, scope_name, path)
    spots = anchor.spots(scope)
    if len(spots) == 1:
        return spots[0]
    if spots:
        nodes = [s.block.body[s.index - (0 if isinstance(anchor, Before) else 1)] for s in spots]
        raise AnchorError(path, scope_name, anchor.text, f"{len(spots)} places match", _places(module, nodes))
    statements = [(node, first_line(module, node)) for block in blocks_of(scope) for node in block.body]
    nearest = _nearest(anchor.text.splitlines()[0], statements)
    raise AnchorError(path, scope_name, anchor.text, "anchor is missing", _places(module, nearest))


def _nearest(wanted: str, named: Iterable[tuple[cst.CSTNode, str]]) -> list[cst.CSTNode]:
    by_text = {text: node for node, text in named}
    return [by_text[text] for text in difflib.get_close_matches(wanted, by_text, n=3, cutoff=0.5)]


def _places(module: cst.Module, nodes: Iterable[cst.CSTNode]) -> list[tuple[int, str]]:
    return sorted((line_of(module, node), first_line(module, node)) for node in nodes)


def _lines(places: Sequence[tuple[int, str]]) -> str:
    return ":" + ",".join(str(line) for line, _ in places) if places else ""
