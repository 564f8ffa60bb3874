# SPDX-License-Identifier: Apache-2.0
"""Manifests and bundles as files: what is written is read back, and what was altered is refused."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from ddtree_overlay.manifest import Bundle, Change, FileEntry, Manifest, sha256


#: Blanks, quotes, line feeds, other scripts: whatever a file system and UTF-8 allow.
PATHS = st.text(min_size=1, max_size=20).map(lambda t: f"srt/{t}.py")
DIGESTS = st.binary(max_size=4).map(sha256)
COUNTS = st.integers(0, 2**63)
ENTRIES = st.builds(FileEntry, PATHS, DIGESTS, COUNTS, st.integers(0, 0o7777), COUNTS, COUNTS, COUNTS)
MANIFESTS = st.builds(
    Manifest,
    st.text(),
    st.text(),
    st.sampled_from(["wheel", "editable", "unpacked"]),
    st.dictionaries(st.text(), st.none() | st.text()),
    st.lists(ENTRIES, max_size=4).map(tuple),
    st.lists(PATHS, max_size=4).map(tuple),
    st.dictionaries(st.text(), st.integers() | st.booleans() | st.text()),
)
CHANGES = st.builds(Change, PATHS, st.none() | DIGESTS, DIGESTS, COUNTS, COUNTS)
BUNDLES = st.builds(Bundle, st.text(), st.lists(CHANGES, max_size=4, unique_by=lambda c: c.path).map(tuple))


@given(MANIFESTS)
def test_a_manifest_is_read_back_as_it_was(manifest: Manifest):
    """Odd paths, huge numbers, absent versions; equal values give equal bytes."""
    data = manifest.to_json()
    assert Manifest.from_json(data) == manifest
    assert Manifest.from_json(data).to_json() == data


@given(BUNDLES)
def test_a_bundle_is_read_back_as_it_was(bundle: Bundle):
    """Its ids are those of its changes, before and after."""
    again = Bundle.from_json(bundle.to_json())
    assert again == bundle
    assert (again.overlay_id, again.base_id) == (bundle.overlay_id, bundle.base_id)


@given(MANIFESTS, st.data())
def test_a_manifest_that_was_cut_or_altered_is_refused_or_whole(manifest: Manifest, data: st.DataObject):
    """Any prefix, any byte: a ValueError, or a manifest with every field of the right kind, never another error."""
    whole = manifest.to_json()
    for damaged in damages(whole, data):
        try:
            read = Manifest.from_json(damaged)
        except ValueError:
            continue
        assert Manifest.from_json(read.to_json()) == read


@given(BUNDLES, st.data())
def test_a_bundle_that_was_cut_or_altered_is_refused_or_the_same(bundle: Bundle, data: st.DataObject):
    """What a host would be given is exactly what was made, or nothing at all."""
    whole = bundle.to_json()
    for damaged in damages(whole, data):
        try:
            assert Bundle.from_json(damaged) == bundle
        except ValueError:
            continue


@given(st.recursive(st.none() | st.integers() | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v)))
def test_any_other_json_is_refused(value: object):
    """A file of another tool, or of a later schema, is a ValueError."""
    for one in (value, {"schema": 1, "files": value}, {"schema": 1, "changes": value, "release": value}):
        for kind in (Manifest, Bundle):
            try:
                kind.from_json(json.dumps(one).encode())
            except ValueError:
                continue
            raise AssertionError(one)


def damages(whole: bytes, data: st.DataObject) -> list[bytes]:
    """A prefix of `whole`, and `whole` with one byte changed."""
    at = data.draw(st.integers(0, len(whole) - 1))
    return [whole[:at], whole[:at] + bytes([data.draw(st.integers(0, 255))]) + whole[at + 1 :]]
