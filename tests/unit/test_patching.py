# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ast
from dataclasses import replace

import pytest
from tests.support import small, wheels

from ddtree_overlay import releases
from ddtree_overlay.edits.anchors import AnchorError
from ddtree_overlay.errors import ConflictError, OverlayError
from ddtree_overlay.manifest import OVERLAY_ID_PATH, Bundle, sha256
from ddtree_overlay.patching import (
    SUPPORTED_RELEASES,
    AlreadyPatchedError,
    build,
    build_release,
    load_overlay,
    modules_of,
    unpatch,
    wanted_paths,
)
from ddtree_overlay.releases import KNOWN, release


def built(base: dict[str, bytes] | None = None):
    return build_release(small.RELEASE, small.base() if base is None else base, small.overlay())


def test_bundle_holds_every_edit_and_every_new_module():
    """Digests of base and result, for exactly the files that change."""
    patched = built()

    assert {c.path for c in patched.bundle.changes} == set(patched.files)
    assert {c.path for c in patched.bundle.changes if c.adds} == {*small.overlay(), OVERLAY_ID_PATH}
    assert all(c.sha256 == sha256(patched.files[c.path]) for c in patched.bundle.changes)
    assert all(c.base_sha256 == sha256(small.base()[c.path]) for c in patched.bundle.changes if not c.adds)
    assert all(c.added > 0 and c.removed == 0 for c in patched.bundle.changes if not c.adds)


def test_the_bundle_carries_a_module_that_names_it():
    """A running server can report its overlay; the module is left out of the id, or no id could ever fit."""
    patched = built()
    bundle = patched.bundle
    scope: dict[str, str] = {}
    exec(patched.files[OVERLAY_ID_PATH], scope)
    others = tuple(c for c in bundle.changes if c.path != OVERLAY_ID_PATH)

    assert scope["OVERLAY_ID"] == bundle.overlay_id == Bundle(bundle.release, others).overlay_id
    assert Bundle.from_json(bundle.to_json()) == bundle


def test_a_bundle_whose_module_names_another_overlay_is_refused():
    """An id that the live server could not report would make every proof fail."""
    bundle = built().bundle
    wrong = tuple(replace(c, sha256="0" * 64) if c.path == OVERLAY_ID_PATH else c for c in bundle.changes)

    with pytest.raises(ValueError, match=r"overlay_id\.py does not name the overlay"):
        Bundle.from_json(replace(bundle, changes=wrong).to_json())


def test_building_twice_gives_the_same_bytes():
    """A bundle depends on its base and on nothing else."""
    first, second = built(), built(dict(reversed(small.base().items())))

    assert first.files == second.files
    assert first.bundle.to_json() == second.bundle.to_json()
    assert Bundle.from_json(first.bundle.to_json()) == first.bundle


def test_base_is_left_alone():
    """Patching is a function, not an action."""
    base = small.base()
    built(base)

    assert base == small.base()


@pytest.mark.parametrize("path", [e.path for e in small.RELEASE.edits])
def test_any_failing_edit_fails_the_whole(path: str):
    """With one anchor of seven gone there is no bundle at all (ds300/patch-package#450, sgl-project/sglang#34849)."""
    base = small.base()
    base[path] = b"x = 1\n"

    with pytest.raises(AnchorError) as caught:
        built(base)

    assert caught.value.path == path


def test_missing_file_is_named():
    """A snapshot without an edited file is an error, not a smaller bundle (Hyperloom#516)."""
    base = small.base()
    del base["srt/managers/schedule_batch.py"]

    with pytest.raises(OverlayError, match=r"srt/managers/schedule_batch\.py is missing"):
        built(base)


@pytest.mark.parametrize("path", [e.path for e in small.RELEASE.edits])
def test_patched_base_is_refused_with_its_own_message(path: str):
    """Already patched is told apart from drifted, with the way out (patch-package#485)."""
    base = small.base()
    base[path] = built().files[path]

    with pytest.raises(AlreadyPatchedError) as caught:
        built(base)

    assert f"{path} is already patched" in caught.value.what
    assert "rollback" in caught.value.next_step
    assert isinstance(caught.value, ConflictError)


def test_base_with_another_overlay_is_refused():
    """Insertions of another version match none of ours, and must not be patched on top of."""
    base = small.base()
    base["srt/server_args.py"] += b"\n\nDDTREE_BUDGET = 8\n"

    with pytest.raises(AlreadyPatchedError, match="already patched") as caught:
        built(base)

    assert "another version" in caught.value.why


def test_new_module_in_the_base_is_refused():
    """A file where a new module would land is not overwritten."""
    path = "srt/speculative/ddtree/args.py"

    with pytest.raises(AlreadyPatchedError, match=r"ddtree/args\.py"):
        built({**small.base(), path: b"theirs = 1\n"})


def test_unsupported_release_is_refused_by_name():
    """An unknown release is never patched on a guess."""
    with pytest.raises(OverlayError, match=r"SGLang 0\.5\.10 is not supported") as caught:
        build(small.base(), "0.5.10", overlay=small.overlay())

    assert all(version in caught.value.why for version in SUPPORTED_RELEASES)


def test_unpatch_needs_no_base():
    """The edit alone leads back to the exact bytes."""
    patched = built()

    for path, data in small.base().items():
        if path in patched.files:
            assert unpatch(patched.files[path], path) == data
            assert unpatch(patched.files[path], path, small.RELEASE.version) == data


def test_unpatch_refuses_what_it_did_not_patch():
    """A pristine file, and a file without an edit."""
    with pytest.raises(AnchorError):
        unpatch(small.base()["srt/server_args.py"], "srt/server_args.py")
    with pytest.raises(OverlayError, match="not edited by the overlay"):
        unpatch(b"", "srt/other.py")


def test_wanted_paths_cover_edits_imports_and_landing_places():
    """A snapshot of these paths is enough to patch and to verify."""
    wanted = wanted_paths(small.overlay())

    assert {e.path for e in small.RELEASE.edits} <= wanted
    assert set(small.overlay()) <= wanted
    assert {"srt/utils.py", "srt/utils/__init__.py", "srt/utils/wrap.py"} <= wanted


@pytest.mark.parametrize("version", SUPPORTED_RELEASES)
def test_the_real_overlay_is_found_and_parses(version: str):
    """Modules by the path they land at, all of it Python that every target can read."""
    modules = load_overlay(version)

    assert {"srt/speculative/ddtree/args.py", "srt/speculative/ddtree/proven.py"} <= set(modules)
    for path, data in modules.items():
        assert path.startswith("srt/")
        ast.parse(data, path, feature_version=(3, 10))


def test_snapshot_taken_before_the_release_is_known_holds_what_any_needs():
    """Which variant's imports count is found out only from the snapshot itself."""
    wanted = wanted_paths()

    assert all(wanted_paths(modules_of(row)) <= wanted for row in KNOWN)


def test_later_variant_lies_over_the_earlier_one():
    """A release's own module takes the place of the one that its generation has."""
    first, second = KNOWN[0], KNOWN[-1]
    path = "srt/speculative/ddtree/proven.py"
    own, other = modules_of(first)[path], modules_of(second)[path]

    assert own != other
    assert modules_of(replace(first, variants=(*second.variants, *first.variants)))[path] == own
    assert modules_of(replace(first, variants=(*first.variants, *second.variants)))[path] == other


def test_pending_release_is_refused_like_an_unknown_one(monkeypatch):
    """What is not complete is not half supported: its row is in the table, and nothing is built from it."""
    *supported, last = releases.RELEASES
    monkeypatch.setattr(releases, "RELEASES", tuple(supported))

    with pytest.raises(OverlayError, match=f"SGLang {last.version} is not supported"):
        build({}, last.version)
    assert not releases.is_supported(last.version)
    assert releases.known(last.version) == last


@pytest.mark.parametrize("version", [SUPPORTED_RELEASES[0], SUPPORTED_RELEASES[-1]])
def test_the_published_wheel_is_patched_and_comes_apart(version: str):
    """With the real overlay: upstream lines stay, and each file gives its published bytes back."""
    overlay = load_overlay(version)
    _, base = wheels.snapshot(wanted_paths(overlay), version)

    patched = build(base, version)

    edited = [c for c in patched.bundle.changes if not c.adds]
    assert len(patched.files) == len(overlay) + 1 + len(edited)
    assert {c.path for c in edited} == {edit.path for edit in release(version).edits}
    assert all(c.removed == 0 for c in patched.bundle.changes)
    for change in edited:
        assert unpatch(patched.files[change.path], change.path, version) == base[change.path]
