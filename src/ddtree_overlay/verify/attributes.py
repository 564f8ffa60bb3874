# SPDX-License-Identifier: Apache-2.0
"""Check `attributes`: what our code reads and sets of SGLang's objects is written down in their classes.

The object's class is known by an annotation, a constructor or its name (`receivers`). An attribute counts as there when
the class, or a base, defines it in its body or sets it on `self`. What `hasattr` asks for first, or `getattr` has a
default for, may be missing.
"""

from __future__ import annotations

import ast
from collections.abc import Collection

from ddtree_overlay.receivers import KEYWORDS
from ddtree_overlay.verify.findings import Tally
from ddtree_overlay.verify.symbols import Class, Symbols, Unknown
from ddtree_overlay.verify.values import Instance, Value
from ddtree_overlay.verify.walker import Walker, called


def check_attributes(
    symbols: Symbols,
    path: str,
    tally: Tally,
    *,
    only: Collection[ast.stmt] | None = None,
    heirs: Collection[Class] = (),
) -> None:
    """Note every attribute of an object of a known class that the class does not have. Arguments as `check_calls`."""
    _Attributes(symbols, path, tally, only=only, heirs=heirs).visit(symbols.tree(path))


class _Attributes(Walker):
    check = "attributes"

    def attribute(self, node: ast.Attribute) -> None:
        # What we set under our own name is ours.
        if isinstance(node.ctx, ast.Load) or "ddtree" not in node.attr:
            self._look_up(node.value, node.attr, node)

    def call(self, node: ast.Call) -> None:
        name = called(node)
        if (name, len(node.args)) in {("getattr", 2), ("setattr", 3)}:
            attribute = self.values.text(node.args[1])
            if attribute is not None:
                self._look_up(node.args[0], attribute, node)
        elif name in KEYWORDS or (name == "replace" and node.args):
            owner = self.values.listed(KEYWORDS[name]) if name in KEYWORDS else self.values.of(node.args[0])
            for keyword in node.keywords:
                if keyword.arg is not None:
                    self._note(owner, keyword.arg, node)

    def _look_up(self, owner: ast.expr, name: str, node: ast.expr) -> None:
        if not self.is_asked_for(owner, name):
            self._note(self.values.of(owner), name, node)

    def _note(self, owner: Value, name: str, node: ast.expr) -> None:
        if isinstance(owner, Unknown):
            return
        found = self.member(owner, name)
        if isinstance(owner, Instance):
            self.tally.attributes += 1
            unseen = isinstance(found, Unknown) and not any(self.symbols.writes(cls, name) for cls in owner.classes)
            self.tally.unseen += unseen
        self.is_missing(found, node)
