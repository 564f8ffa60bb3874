# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support import wheels

from ddtree_overlay.manifest import FileEntry, Manifest
from ddtree_overlay.patching import wanted_paths
from ddtree_overlay.published import departures, published, unlike_published
from ddtree_overlay.releases import RELEASES
from ddtree_overlay.verify.structure import check_base


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = Path(__file__).parents[2]


@pytest.mark.parametrize("version", [row.version for row in RELEASES])
def test_every_supported_release_is_known_as_published(version):
    """Its manifest is under version control, goes into the wheel, and holds each file that is edited."""
    found = published(version)
    assert found is not None
    assert {edit.path for row in RELEASES if row.version == version for edit in row.edits} <= {
        e.path for e in found.files
    }
    config = tomllib.loads((PROJECT / "pyproject.toml").read_text("utf-8"))
    included = config["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    name = f"sglang-{version}"
    assert included[f"snapshots/{name}/manifest.json"] == f"ddtree_overlay/_published/{name}.json"


def test_departures_are_named_by_kind():
    """What the release's manifest does not hold was not compared, and is not passed over in silence."""
    entries = {p: FileEntry(p, p, 1) for p in "abcde"}
    release = Manifest("r", "", "wheel", {"sglang": "0.5.11"}, (entries["a"], entries["b"], entries["c"]), ("a", "b"))
    found = replace(release, files=(replace(entries["a"], sha256="x"), entries["d"], entries["e"]), mentions=("a", "d"))

    assert departures(found, release) == {
        "a": "changed", "b": "missing", "c": "absent", "d": "added", "e": "unknown",
    }  # fmt: skip
    assert departures(release, release) == {}


def test_only_compared_files_are_said_to_be_as_published():
    """A file that the release's manifest lacks is warned of: an edit of it would not be noticed."""
    known = published("0.5.17")
    assert known is not None
    as_published = [f"{len(known.files)} files are as SGLang 0.5.17 was published"]
    assert [f.message for f in check_base(known)] == as_published

    more = replace(known, files=(*known.files, FileEntry("srt/other.py", "x", 1)))
    (found,) = check_base(more)
    assert (found.severity, found.path) == ("warning", "srt/other.py")
    assert found.message.startswith("not compared: ")


@pytest.mark.parametrize("version", [row.version for row in RELEASES])
def test_committed_manifests_hold_what_a_snapshot_takes(version):
    """Else `verify` could not tell whether somebody has edited what is missing there; `make patches` mends it."""
    known = published(version)
    assert known is not None
    taken, _ = wheels.snapshot(wanted_paths(), version)

    assert {e.path: e.sha256 for e in taken.files}.items() <= {e.path: e.sha256 for e in known.files}.items()
    assert set(taken.mentions) <= set(known.mentions)


def test_a_file_that_was_only_read_and_is_gone_is_warned_of():
    """It does not mention DFlash: a base without it was said to be as published."""
    known = published("0.5.11")
    assert known is not None
    gone = "srt/mem_cache/allocator.py"
    assert known.entry(gone) and gone not in known.mentions

    (found,) = check_base(replace(known, files=tuple(e for e in known.files if e.path != gone)))
    assert (found.severity, found.path) == ("warning", gone)
    assert found.message.startswith("not in the snapshot: ")


def test_base_of_an_unknown_version_is_said_to_be_unknown():
    """Silence would read as approval."""
    found = Manifest("r", "", "wheel", {"sglang": "9.9"}, ())

    assert unlike_published(found) == {}
    assert [f.message for f in check_base(found)] == ["what SGLang 9.9 was published as is not known here"]
