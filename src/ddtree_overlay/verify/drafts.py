# SPDX-License-Identifier: Apache-2.0
"""The table of a release that nobody has classified yet, as far as a program can write it.

What is gone is written down as gone. What changed is there behind `#`, line by line: taking the mark away says that
somebody has read the place again and that verdict and reason still hold. What is new has neither verdict nor reason,
and the table cannot be loaded before it has both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from ddtree_overlay.verify.mentions import Mentions, Place
from ddtree_overlay.verify.sites import without_rules
from ddtree_overlay.verify.tables import Site


_WIDTH = 120


def draft_table(
    based_on: str,
    sites: Collection[Site],
    found: Mapping[Place, Mentions],
    mirrors: Mapping[Place, str | None],
) -> str:
    """The text of a table.

    Args:
        based_on: Name of the table that it builds on.
        sites: That table.
        found: The mentions of the new release.
        mirrors: Functions that the overlay continues or replaces and that changed, with the new digest; None: gone.
    """
    left, used = without_rules(found, sites)
    listed = {Place(s.path, s.scope): s for s in sites if not s.is_rule}
    gone = [Place(rule.path, rule.scope) for rule in sites if rule.is_rule and rule not in used]
    gone += [place for place in listed if place not in left]
    changed = {place: counts for place, counts in left.items() if place in listed and counts != listed[place].mentions}
    new = {place: counts for place, counts in left.items() if place not in listed}
    parts = [
        "# SPDX-License-Identifier: Apache-2.0\n"
        f"# What differs from the table of SGLang {based_on}. The format is described in 0.5.11.toml.",
        f"based_on = {_quoted(based_on)}",
    ]
    if gone:
        parts.append("[gone]\n" + "\n".join(_array(p, scopes) for p, scopes in _by_path(gone).items()))
    for path, scopes in _by_path(changed).items():
        lines = [_array(scope, _texts(changed[Place(path, scope)])) for scope in scopes]
        parts.append("\n".join(f"# {line}" for line in "\n".join([f"[mentions.{_quoted(path)}]", *lines]).splitlines()))
    for path, scopes in _by_path(mirrors).items():
        lines = [f"{_quoted(scope)} = {_quoted(mirrors[Place(path, scope)] or '')}" for scope in scopes]
        parts.append("\n".join(f"# {line}" for line in [f"[mirrors.{_quoted(path)}]", *lines]))
    for place, counts in sorted(new.items()):
        parts.append(
            f"[[site]]\npath = {_quoted(place.path)}\nscope = {_quoted(place.scope)}\n"
            f'verdict = ""\nreason = ""\n{_array("mentions", _texts(counts), key=False)}'
        )
    return "\n\n".join(parts) + "\n"


def _by_path(places: Iterable[Place]) -> dict[str, list[str]]:
    paths: dict[str, list[str]] = {}
    for place in sorted(places):
        paths.setdefault(place.path, []).append(place.scope)
    return paths


def _texts(counts: Counter[str]) -> list[str]:
    return [text + (f" x{count}" if count > 1 else "") for text, count in counts.items()]


def _quoted(text: str) -> str:
    """A TOML string; mentions hold double quotes, never both kinds."""
    return f"'{text}'" if '"' in text else f'"{text}"'


def _array(name: str, items: Iterable[str], *, key: bool = True) -> str:
    head = (_quoted(name) if key else name) + " = "
    quoted = [_quoted(item) for item in items]
    line = f"{head}[{', '.join(quoted)}]"
    if len(line) <= _WIDTH:
        return line
    return "\n".join([f"{head}[", *(f"    {item}," for item in quoted), "]"])
