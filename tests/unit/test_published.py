# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ddtree_overlay.manifest import FileEntry, Manifest
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
    """Files that only this overlay's snapshots hold are compared where both have them, and else left out."""
    entries = {p: FileEntry(p, p, 1) for p in "abcd"}
    release = Manifest("r", "", "wheel", {"sglang": "0.5.11"}, (entries["a"], entries["b"], entries["c"]), ("a", "b"))
    found = replace(release, files=(replace(entries["a"], sha256="x"), entries["d"]), mentions=("a", "d"))

    assert departures(found, release) == {"a": "changed", "b": "missing", "d": "added"}
    assert departures(release, release) == {}


def test_base_of_an_unknown_version_is_said_to_be_unknown():
    """Silence would read as approval."""
    found = Manifest("r", "", "wheel", {"sglang": "9.9"}, ())

    assert unlike_published(found) == {}
    assert [f.message for f in check_base(found)] == ["what SGLang 9.9 was published as is not known here"]
