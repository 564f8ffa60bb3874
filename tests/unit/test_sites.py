# SPDX-License-Identifier: Apache-2.0
"""The tables in `sites/` classify exactly what the published releases hold, and what they rely on is there."""

from __future__ import annotations

import sys
from collections import Counter
from importlib import resources

import pytest
from tests.support import wheels

from ddtree_overlay.releases import RELEASES, Release
from ddtree_overlay.verify.drafts import draft_table
from ddtree_overlay.verify.grounds import check_grounds
from ddtree_overlay.verify.mentions import Place, mentions_in
from ddtree_overlay.verify.mirrors import check_mirrors
from ddtree_overlay.verify.sites import check_sites
from ddtree_overlay.verify.tables import VERDICTS, Site, load_mirrors, load_sites, rows_of


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TABLES = sorted(
    path.name.removesuffix(".toml")
    for path in (resources.files("ddtree_overlay") / "sites").iterdir()
    if path.name.endswith(".toml")
)

FILE = {
    "srt/a.py": b"""\
class A:
    def run(self, args):
        return args.speculative_eagle_topk or self.is_dflash()
""",
    "srt/b/c.py": b"""\
from sglang.srt.a import is_dflash

WIDTH = is_dflash()
""",
}
ROW = Site(
    "srt/a.py",
    "A.run",
    "same",
    "Test.",
    Counter({"args.speculative_eagle_topk": 1, "self.is_dflash()": 1}),
)
RULE = Site("srt/b/*", "*", "same", "Test.", None)


def _errors(*sites: Site) -> list[str]:
    return [f.message for f in check_sites(sites, [], FILE) if f.severity == "error"]


@pytest.mark.parametrize("name", TABLES)
def test_table_classifies_exactly_the_published_release(name):
    """Nothing more, nothing less, each with a reason, and no rule that speaks for nothing."""
    sites = load_sites(name)

    errors = [f for f in check_sites(sites, [], wheels.package(name)) if f.severity == "error"]

    errors += [f for f in check_mirrors(load_mirrors(name), wheels.package(name)) if f.severity == "error"]

    assert errors == []
    assert all(s.verdict in VERDICTS and len(s.reason) > 20 for s in sites)


@pytest.mark.parametrize("row", RELEASES, ids=lambda row: row.version)
def test_every_supported_release_has_a_table(row: Release):
    """Releases may share one."""
    assert row.sites in TABLES


def test_table_takes_rows_over_from_the_one_it_is_based_on():
    """A row stands in place of the one with its path and scope, and what is gone is not taken over."""
    base = {Place(s.path, s.scope): s for s in load_sites("0.5.11")}
    table = {Place(s.path, s.scope): s for s in load_sites("0.5.12")}

    unchanged = Place("srt/managers/scheduler.py", "Scheduler.handle_generate_request")
    assert table[unchanged] == base[unchanged]
    replaced = Place("srt/server_args.py", "ServerArgs")
    assert table[replaced].mentions != base[replaced].mentions
    assert table[replaced].reason == base[replaced].reason
    gone = Place("srt/speculative/dflash_utils.py", "compute_dflash_sampling_accept_len_and_bonus")
    assert gone in base
    assert gone not in table


def test_row_and_rule_together_leave_nothing_open():
    """The small release is classified: what follows takes one thing away at a time."""
    assert _errors(ROW, RULE) == []


def test_a_site_that_nobody_classified_is_found_with_its_line():
    """New code of a release."""
    (finding,) = [f for f in check_sites([RULE], [], {"srt/a.py": FILE["srt/a.py"], **FILE}) if f.severity == "error"][
        :1
    ]

    assert finding.line == 3
    assert "nobody has classified `args.speculative_eagle_topk` in A.run" in finding.message


def test_a_site_that_is_gone_is_found():
    """A release that dropped it may have moved it to where nobody looked."""
    more = Site(ROW.path, "A.stop", "same", "Test.", Counter({'"DFLASH"': 1}))

    assert _errors(ROW, more, RULE) == ['classified as same, but gone: `"DFLASH"` in A.stop']


def test_a_file_that_is_gone_is_found_once():
    """Not once a mention: a snapshot that an older version took lacks whole files, and the text says so."""
    missing = Site("srt/d.py", "D.run", "same", "Test.", Counter({'"DFLASH"': 1, "x.is_dflash()": 1}))

    (message,) = _errors(ROW, missing, RULE)

    assert "gone from the release, or the snapshot is too old" in message


def test_a_rule_that_matches_nothing_any_more_is_found():
    """A renamed file must not leave its rule behind, ready for another file."""
    stale = Site("srt/old_*", "*", "refused", "Test.", None, by="args.x")

    assert _errors(ROW, RULE, stale) == ["classified as refused, but gone: all of *"]


def test_a_rule_takes_only_the_mentions_that_it_names():
    """A call stays open where only imports are waved through."""
    imports = Site("*", "*", "same", "Test.", None, only=("import *",))

    assert _errors(ROW, imports) == ["nobody has classified `is_dflash()` in <module>"]


def test_a_row_counts_more_than_a_rule_for_its_file():
    """A place that was read by somebody is compared word for word, whatever is said of the rest of the file."""
    wide = Site("srt/a.py", "*", "same", "Test.", None)
    other = Site("srt/a.py", "A.run", "same", "Test.", Counter({"self.is_dflash()": 1}))

    assert "nobody has classified `args.speculative_eagle_topk` in A.run" in _errors(other, wide, RULE)


GATES = {
    "srt/speculative/ddtree/args.py": b"""\
_FEATURES = (("enable_lora", False),)


def check_features(server_args):
    return _FEATURES


def check_model(server_args):
    return None


def finish(server_args):
    return check_features(server_args)
""",
    "srt/speculative/ddtree/proven.py": b'TREE_ATTENTION_BACKENDS = ("triton", "fa3")\n',
    "srt/hook.py": b"""\
class Hook:
    def refuse(self):
        raise ValueError
""",
}


@pytest.mark.parametrize(
    ("by", "problem"),
    [
        ("args.check_features", None),
        ("args._FEATURES enable_lora", None),
        ("args._FEATURES enable_dp", "_FEATURES has no entry 'enable_dp'"),
        ("args.check_model", "nothing uses check_model"),
        ("args.check_nothing", "args.py of the overlay does not define check_nothing"),
        ("gates.check", "gates.py of the overlay does not define check"),
        ("backend wave", None),
        ("backend fa3", "targets may have fa3"),
        ("sglang srt/hook.py Hook.refuse", None),
        ("sglang srt/hook.py Hook.admit", "SGLang has no such function"),
        ("sglang srt/other.py refuse", "srt/other.py is not in the snapshot"),
    ],
)
def test_a_refusal_names_a_gate_that_exists(by, problem):
    """A gate that is taken away, or never was there, leaves its sites open."""
    site = Site("srt/a.py", "A.run", "refused", "Test.", None, by=by)

    found = [f.message for f in check_grounds([site], RELEASES[0], GATES) if f.severity == "error"]

    assert len(found) == (problem is not None)
    assert problem is None or problem in found[0]


def test_an_edited_site_is_edited():
    """In its own scope, or in the one that the row names."""
    path = "srt/server_args.py"
    here = Site(path, "ServerArgs.add_cli_args", "edited", "Test.", Counter())
    there = Site("srt/x.py", "run", "edited", "Test.", Counter(), by=f"{path} ServerArgs.add_cli_args")
    nowhere = Site(path, "ServerArgs.nothing", "edited", "Test.", Counter())
    no_file = Site("srt/x.py", "run", "edited", "Test.", Counter())

    def found(*sites: Site) -> list[str]:
        return [f.message for f in check_grounds(sites, RELEASES[0], {}) if f.severity == "error"]

    assert found(here, there) == []
    assert "no insertion is in that scope" in found(nowhere)[0]
    assert "no edit of that file" in found(no_file)[0]


def test_a_draft_holds_what_a_program_can_know():
    """What is gone is gone, what changed waits to be read again, and what is new has no verdict yet."""
    more = Site("srt/a.py", "A.stop", "same", "Test.", Counter({'"DFLASH"': 1}))
    changed = Site("srt/a.py", "A.run", "same", "Test.", Counter({"args.speculative_eagle_topk": 1}))
    found = {place: mentions for path, data in FILE.items() for place, mentions in mentions_in(path, data).items()}

    mirrored = {Place("srt/a.py", "A.run"): "0123", Place("srt/a.py", "A.stop"): None}
    draft = draft_table("0.5.23", [changed, more], found, mirrored)
    read_again = "\n".join(line.removeprefix("# ") for line in draft.splitlines()[2:])

    assert tomllib.loads(draft)["gone"] == {"srt/a.py": ["A.stop"]}
    assert "mentions" not in tomllib.loads(draft)
    assert tomllib.loads(read_again)["mentions"] == {
        "srt/a.py": {"A.run": ["args.speculative_eagle_topk", "self.is_dflash()"]}
    }
    assert "mirrors" not in tomllib.loads(draft)
    assert tomllib.loads(read_again)["mirrors"] == {"srt/a.py": {"A.run": "0123", "A.stop": ""}}
    (new,) = tomllib.loads(draft)["site"]
    assert (new["path"], new["scope"]) == ("srt/b/c.py", "<module>")
    with pytest.raises(ValueError, match="needs a verdict"):
        rows_of(new, "sites/x.toml")


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"verdict": "maybe"}, "needs a verdict"),
        ({"reason": ""}, "needs a verdict"),
        ({"verdict": "refused"}, "does not say by what"),
    ],
)
def test_a_row_without_verdict_reason_or_gate_is_refused(row, problem):
    """Half a decision is none."""
    entry = {"path": "srt/x.py", "scope": "f", "verdict": "same", "reason": "Because.", "mentions": [], **row}

    with pytest.raises(ValueError, match=problem):
        rows_of(entry, "sites/x.toml")
