# SPDX-License-Identifier: Apache-2.0
"""Check `mirrors`: functions of SGLang that the overlay continues or has its own version of are as somebody read them.

A mention tells where SGLang asks for DFLASH. It does not tell that DFLASH's own step has learnt something: to gather
logits that are spread over ranks, or to compute log-probabilities. The overlay's step then has to learn it too. So the
tables in `sites/` hold a digest of each such function, taken when it was last read; another digest is a finding.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Mapping
from functools import lru_cache

from ddtree_overlay.verify.findings import Finding
from ddtree_overlay.verify.mentions import Place


_Function = ast.FunctionDef | ast.AsyncFunctionDef


def check_mirrors(mirrors: Mapping[Place, str], base: Mapping[str, bytes]) -> list[Finding]:
    """A finding for each function that is gone, or is another one than was read.

    Args:
        mirrors: Function -> digest.
        base: The snapshot's files.
    """
    findings = []
    for place, read in sorted(mirrors.items()):
        now = digest_of(base.get(place.path, b""), place.scope)
        if now is None:
            message = f"{place.scope} is gone, and the overlay has its own version of it or of what follows in it"
        elif now != read:
            message = (
                f"{place.scope} has changed since somebody read it; the overlay has its own version of it, or of what "
                f"follows in it: read it again, follow where that is needed, and note the digest {now}"
            )
        else:
            continue
        findings.append(Finding("mirrors", "error", place.path, None, message))
    message = f"{len(mirrors)} functions that the overlay continues or replaces compared with what was read"
    return [*findings, Finding("mirrors", "info", "", None, message)]


def digest_of(data: bytes, scope: str) -> str | None:
    """A digest of a function's code, or None when there is no such function.

    Layout, comments and docstring do not count. It is taken from the text, since different versions of Python write
    down a syntax tree differently.
    """
    node = _function(_tree(data).body, scope.split("."))
    if node is None:
        return None
    lines = data.decode("utf-8").splitlines()
    first = node.body[0]
    docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    skipped = range(first.lineno, (first.end_lineno or first.lineno) + 1) if docstring else range(0)
    code = [
        line
        for number, line in enumerate(lines[node.lineno - 1 : node.end_lineno], node.lineno)
        if number not in skipped and not line.lstrip().startswith("#")
    ]
    # A line that became too long is broken, with a comma behind the last argument.
    text = re.sub(r",(?=[)\]}])", "", re.sub(r"\s", "", "".join(code)))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@lru_cache(maxsize=2)
def _tree(data: bytes) -> ast.Module:
    """The parsed file; those who ask go through its functions one after the other."""
    return ast.parse(data)


def _function(body: list[ast.stmt], names: list[str]) -> _Function | None:
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name == names[0] and len(names) > 1:
            return _function(node.body, names[1:])
        if isinstance(node, _Function) and names == [node.name]:
            return node
    return None
