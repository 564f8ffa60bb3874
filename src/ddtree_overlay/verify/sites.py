# SPDX-License-Identifier: Apache-2.0
"""Check `sites`: somebody has decided for every DFLASH mention of the release what DDTREE does there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from ddtree_overlay.verify.findings import Finding
from ddtree_overlay.verify.mentions import Mentions, Place, mentions_in
from ddtree_overlay.verify.tables import Site


def check_sites(sites: Collection[Site], mentioned: Collection[str], base: Mapping[str, bytes]) -> list[Finding]:
    """A finding for each mention that is not in the table, and for each row of the table that is not in the release.

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
    left, used = without_rules(found, sites)
    listed = {Place(s.path, s.scope): s for s in sites if not s.is_rule}
    for place, counts in sorted(left.items()):
        findings += _unlisted(place, found[place], counts, listed.get(place))
    for path in sorted({place.path for place in listed} - base.keys()):
        message = (
            "holds classified sites, but is not in the snapshot: gone from the release, or the snapshot is too old"
        )
        findings.append(Finding("sites", "error", path, None, message))
    for place, site in sorted(listed.items()):
        findings += _gone(place, left.get(place, Counter()), site) if place.path in base else []
    findings += [
        Finding("sites", "error", rule.path, None, f"classified as {rule.verdict}, but gone: all of {rule.scope}")
        for rule in sites
        if rule.is_rule and rule not in used
    ]
    message = f"{len(found)} scopes mention DFlash or a width: {len(left)} listed, {len(found) - len(left)} by rule"
    return [*findings, Finding("sites", "info", "", None, message)]


def without_rules(
    found: Mapping[Place, Mentions], sites: Iterable[Site]
) -> tuple[dict[Place, Counter[str]], list[Site]]:
    """What no rule speaks for, by scope, and the rules that spoke.

    A scope that has a row of its own is that row's; of rules, only those that name mentions still count there.
    """
    listed = {Place(s.path, s.scope) for s in sites if not s.is_rule}
    rules = [s for s in sites if s.is_rule]
    left: dict[Place, Counter[str]] = {}
    used: list[Site] = []
    for place, mentions in found.items():
        counts = Counter(mentions.counts)
        for rule in rules:
            if not rule.covers(place) or (place in listed and not rule.only):
                continue
            taken = [text for text in counts if rule.takes(text)]
            if taken and rule not in used:
                used.append(rule)
            for text in taken:
                del counts[text]
        if counts:
            left[place] = counts
    return left, used


def _unlisted(place: Place, mentions: Mentions, counts: Counter[str], site: Site | None) -> list[Finding]:
    known: Counter[str] = (site.mentions if site else None) or Counter()
    findings = []
    for text, extra in (counts - known).items():
        times = f" ({extra} more than the {known[text]} known)" if known[text] else ""
        message = f"nobody has classified `{text}` in {place.scope}{times}"
        findings.append(Finding("sites", "error", place.path, mentions.lines[text], message))
    return findings


def _gone(place: Place, counts: Counter[str], site: Site) -> list[Finding]:
    assert site.mentions is not None
    return [
        Finding(
            "sites", "error", place.path, None, f"classified as {site.verdict}, but gone: `{text}` in {place.scope}"
        )
        for text in (site.mentions - counts)
    ]
