# SPDX-License-Identifier: Apache-2.0
"""The tables in `sites/`: what somebody has decided about every place of a release that mentions DFlash."""

from __future__ import annotations

import fnmatch
import sys
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from ddtree_overlay.verify.mentions import Place


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

VERDICTS = ("same", "edited", "refused", "unreached")


@dataclass(frozen=True, slots=True)
class Site:
    """One scope of the table, or a rule.

    Args:
        path: Package-relative, or a pattern.
        scope: Dotted name, or a pattern.
        verdict: One of VERDICTS.
        reason: Why that is right.
        mentions: How often each mention is made; None for a rule, which takes whatever it matches.
        by: What edits or refuses it (see `grounds`); None where the scope itself is edited, or nothing has to.
        only: Patterns of the mentions that a rule takes; empty: all.
    """

    path: str
    scope: str
    verdict: str
    reason: str
    mentions: Counter[str] | None
    by: str | None = None
    only: tuple[str, ...] = ()

    @property
    def is_rule(self) -> bool:
        """Whether it speaks for every place that matches."""
        return self.mentions is None

    def covers(self, place: Place) -> bool:
        """Whether a rule speaks for a place."""
        return fnmatch.fnmatchcase(place.path, self.path) and fnmatch.fnmatchcase(place.scope, self.scope)

    def takes(self, text: str) -> bool:
        """Whether a rule speaks for a mention of a place that it covers."""
        return not self.only or any(fnmatch.fnmatchcase(text, pattern) for pattern in self.only)


def load_sites(name: str) -> tuple[Site, ...]:
    """The table of a release, with the rows it takes from the table it is based on.

    Raises:
        ValueError: The table holds an unknown verdict, a row without a reason or a refusal without a gate, drops or
            changes a row that is not there, or repeats one.
    """
    where = f"sites/{name}.toml"
    table = _table(name)
    sites = _inherited(table, where)
    for row in table.get("site", ()):
        for site in rows_of(row, where):
            if sites.get(_key(site)) == site:
                raise ValueError(f"{where}: {site.path} [{site.scope}] repeats the table it is based on")
            sites[_key(site)] = site
    return tuple(sites.values())


_Key = tuple[Place, tuple[str, ...]]


def _inherited(table: Mapping[str, Any], where: str) -> dict[_Key, Site]:
    """The rows of the table that this one is based on, less those that are gone, with the mentions of this release."""
    if "based_on" not in table:
        return {}
    sites = {_key(site): site for site in load_sites(table["based_on"])}
    for path, scopes in table.get("gone", {}).items():
        for scope in scopes:
            dropped = [key for key in sites if key[0] == Place(path, scope)]
            if not dropped:
                raise ValueError(f"{where}: {path} [{scope}] is not in the table it is based on")
            for key in dropped:
                del sites[key]
    for path, changed in table.get("mentions", {}).items():
        for scope, mentions in changed.items():
            key = (Place(path, scope), ())
            if key not in sites or sites[key].is_rule:
                raise ValueError(f"{where}: {path} [{scope}] is not in the table it is based on")
            sites[key] = replace(sites[key], mentions=_counted(mentions))
    return sites


def load_mirrors(name: str) -> dict[Place, str]:
    """The digests of functions that the overlay continues or replaces, with those of the table it is based on.

    A digest that is empty drops the function.
    """
    table = _table(name)
    mirrors = load_mirrors(table["based_on"]) if "based_on" in table else {}
    for path, digests in table.get("mirrors", {}).items():
        mirrors |= {Place(path, scope): digest for scope, digest in digests.items()}
    return {place: digest for place, digest in mirrors.items() if digest}


def _table(name: str) -> dict[str, Any]:
    text = (resources.files("ddtree_overlay") / "sites" / f"{name}.toml").read_text(encoding="utf-8")
    table: dict[str, Any] = tomllib.loads(text)
    return table


def _key(site: Site) -> _Key:
    return Place(site.path, site.scope), site.only


def rows_of(row: Mapping[str, Any], table: str) -> list[Site]:
    """The sites of one entry: `scope` with its `mentions`, many of them as `scopes`, or neither for a rule.

    Raises:
        ValueError: It has an unknown verdict, no reason, or is refused by nothing.
    """
    scopes: Mapping[str, Collection[str] | None] = row.get("scopes") or {row["scope"]: row.get("mentions")}
    verdict, reason, by = row["verdict"], row["reason"], row.get("by")
    where = f"{table}: {row['path']} [{', '.join(scopes)}]"
    if verdict not in VERDICTS or not reason:
        raise ValueError(f"{where} needs a verdict of {VERDICTS} and a reason")
    if verdict == "refused" and not by:
        raise ValueError(f"{where} is refused, but does not say by what")
    only = tuple(row.get("only", ()))
    return [
        Site(row["path"], scope, verdict, reason, None if mentions is None else _counted(mentions), by, only)
        for scope, mentions in scopes.items()
    ]


def _counted(items: Collection[str]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for item in items:
        text, cross, times = item.rpartition(" x")
        if cross and times.isdigit():
            counts[text] = int(times)
        else:
            counts[item] = 1
    return counts
