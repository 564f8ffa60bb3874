# SPDX-License-Identifier: Apache-2.0
"""Check `sites`: somebody has decided for every DFLASH mention of the release what DDTREE does there."""

from __future__ import annotations

import fnmatch
import sys
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib import resources

from ddtree_overlay.verify.findings import Finding
from ddtree_overlay.verify.mentions import Mentions, Place, mentions_in


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

VERDICTS = ("same", "edited", "refused", "unreached")


@dataclass(frozen=True, slots=True)
class Site:
    """One scope of the table.

    Args:
        path: Package-relative, or a pattern.
        scope: Dotted name, or `*` with a pattern.
        verdict: One of VERDICTS.
        reason: Why that is right.
        mentions: How often each mention is made; None takes whatever the pattern matches.
    """

    path: str
    scope: str
    verdict: str
    reason: str
    mentions: Counter[str] | None

    @property
    def is_rule(self) -> bool:
        """Whether it speaks for every file that matches."""
        return self.mentions is None

    def covers(self, place: Place) -> bool:
        """Whether a rule speaks for a place."""
        return fnmatch.fnmatchcase(place.path, self.path) and fnmatch.fnmatchcase(place.scope, self.scope)


def load_sites(name: str) -> tuple[Site, ...]:
    """The table of a release, with the rows it takes from the table it is based on.

    Raises:
        ValueError: The table holds an unknown verdict, a row without a reason, or drops a row that is not there.
    """
    text = (resources.files("ddtree_overlay") / "sites" / f"{name}.toml").read_text(encoding="utf-8")
    table = tomllib.loads(text)
    sites = {}
    if "based_on" in table:
        sites = {Place(site.path, site.scope): site for site in load_sites(table["based_on"])}
        for path, scope in table.get("gone", ()):
            if sites.pop(Place(path, scope), None) is None:
                raise ValueError(f"sites/{name}.toml: {path} [{scope}] is not in the table it is based on")
    for row in table["site"]:
        if row["verdict"] not in VERDICTS or not row["reason"]:
            raise ValueError(
                f"sites/{name}.toml: {row['path']} [{row['scope']}] needs a verdict of {VERDICTS} and a reason"
            )
        mentions = _counted(row["mentions"]) if "mentions" in row else None
        site = Site(row["path"], row["scope"], row["verdict"], row["reason"], mentions)
        sites[Place(site.path, site.scope)] = site
    return tuple(sites.values())


def check_sites(sites: Collection[Site], mentioned: Collection[str], base: Mapping[str, bytes]) -> list[Finding]:
    """A finding for each mention that is not in the table, and for each one in the table that is gone.

    Args:
        sites: The table.
        mentioned: Paths that hold a mention according to the snapshot's manifest.
        base: The snapshot's files.
    """
    findings = [
        Finding("sites", "error", path, None, "mentions DFlash but is not part of the snapshot, so nothing was checked")
        for path in mentioned
        if path not in base
    ]
    found: dict[Place, Mentions] = {}
    for path, data in base.items():
        if path.startswith("srt/") and path.endswith(".py"):
            found |= mentions_in(path, data)
    rules = [site for site in sites if site.is_rule]
    listed = {Place(s.path, s.scope): s for s in sites if not s.is_rule}
    covered = 0
    for place, mentions in sorted(found.items()):
        if place not in listed and any(rule.covers(place) for rule in rules):
            covered += 1
            continue
        findings += _unlisted(place, mentions, listed.get(place))
    for place, site in sorted(listed.items()):
        findings += _gone(place, found.get(place, Mentions()), site)
    message = f"{len(found)} scopes mention DFlash or a width: {len(found) - covered} listed, {covered} by rule"
    return [*findings, Finding("sites", "info", "", None, message)]


def _unlisted(place: Place, mentions: Mentions, site: Site | None) -> list[Finding]:
    known: Counter[str] = (site.mentions if site else None) or Counter()
    findings = []
    for text, extra in (mentions.counts - known).items():
        times = f" ({extra} more than the {known[text]} known)" if known[text] else ""
        message = f"nobody has classified `{text}` in {place.scope}{times}"
        findings.append(Finding("sites", "error", place.path, mentions.lines[text], message))
    return findings


def _gone(place: Place, mentions: Mentions, site: Site) -> list[Finding]:
    assert site.mentions is not None
    return [
        Finding(
            "sites", "error", place.path, None, f"classified as {site.verdict}, but gone: `{text}` in {place.scope}"
        )
        for text in (site.mentions - mentions.counts)
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
