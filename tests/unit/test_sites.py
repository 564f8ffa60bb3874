# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from tests.support import wheels

from ddtree_overlay.releases import RELEASES, Release
from ddtree_overlay.verify.mentions import Place, mentions_in
from ddtree_overlay.verify.sites import VERDICTS, load_sites


SOURCE = b'''\
"""DFLASH here is prose."""
from sglang.dflash import DFlashThing as Thing  # DFLASH


class DFlashWorker:
    """DFLASH."""

    def run(self, dflash_size, args):
        self.speculative_eagle_topk = args.get().speculative_eagle_topk
        if self.algorithm.is_dflash() or self.name == "DFLASH":
            raise ValueError("DFLASH cannot do this", f"DFLASH {dflash_size}")
        return f(dflash_size=1, x=getattr(args, "speculative_num_draft_tokens"))
'''


def test_mentions_are_written_by_what_they_are():
    """Names by their dotted form and role, strings without blanks; comments, docstrings and messages not at all."""
    found = mentions_in("srt/x.py", SOURCE)

    assert set(found) == {Place("srt/x.py", "<module>"), Place("srt/x.py", "DFlashWorker.run")}
    assert dict(found[Place("srt/x.py", "<module>")].counts) == {
        "import sglang.dflash": 1,
        "import DFlashThing": 1,
        "class DFlashWorker": 1,
    }
    assert dict(found[Place("srt/x.py", "DFlashWorker.run")].counts) == {
        "param dflash_size": 1,
        "self.speculative_eagle_topk =": 1,
        "args.get().speculative_eagle_topk": 1,
        "self.algorithm.is_dflash()": 1,
        '"DFLASH"': 1,
        "dflash_size": 1,
        "dflash_size=": 1,
        '"speculative_num_draft_tokens"': 1,
    }


def test_shifted_lines_and_other_layout_change_nothing():
    """A table survives a reformatted release."""
    moved = b"\n\n" + SOURCE.replace(
        b"self.algorithm.is_dflash() or", b"(\n            self.algorithm.is_dflash()\n        ) or"
    )

    before, after = mentions_in("srt/x.py", SOURCE), mentions_in("srt/x.py", moved)

    assert {p: m.counts for p, m in before.items()} == {p: m.counts for p, m in after.items()}


@pytest.mark.parametrize("row", RELEASES, ids=lambda row: row.version)
def test_table_classifies_exactly_the_published_release(row: Release):
    """Nothing more, nothing less, each with a reason, and edited scopes are edited."""
    sites = load_sites(row.sites)
    listed = {Place(s.path, s.scope): s.mentions for s in sites if not s.is_rule}
    rules = [s for s in sites if s.is_rule]
    found = {}
    for path, data in wheels.package(row.version).items():
        for place, mentions in mentions_in(path, data).items():
            if not any(rule.covers(place) for rule in rules):
                found[place] = mentions.counts

    assert listed == found
    assert all(s.verdict in VERDICTS and len(s.reason) > 20 for s in sites)
    edited_files = {edit.path for edit in row.edits}
    assert {s.path for s in sites if s.verdict == "edited"} <= edited_files


def test_table_takes_rows_over_from_the_one_it_is_based_on():
    """A row stands in place of the one with its path and scope, and what is gone is not taken over."""
    base = {Place(s.path, s.scope): s for s in load_sites("0.5.11")}
    table = {Place(s.path, s.scope): s for s in load_sites("0.5.12")}

    unchanged = Place("srt/managers/scheduler.py", "<module>")
    assert table[unchanged] == base[unchanged]
    replaced = Place("srt/server_args.py", "ServerArgs")
    assert table[replaced].mentions != base[replaced].mentions
    gone = Place("srt/speculative/dflash_utils.py", "compute_dflash_sampling_accept_len_and_bonus")
    assert gone in base
    assert gone not in table
