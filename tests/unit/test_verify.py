# SPDX-License-Identifier: Apache-2.0
"""Each fault is planted in a tree that is fine, and must be found by the check it belongs to and by no other."""

from __future__ import annotations

import platform

import pytest
from tests.support import small, wheels
from tests.support.planted import ARGS, SERVER_ARGS, WORKER, Tree, edited

from ddtree_overlay.manifest import Bundle
from ddtree_overlay.patching import SUPPORTED_RELEASES, Patched, build, load_overlay, wanted_paths
from ddtree_overlay.verify import verify_bundle


def test_sound_tree_has_no_errors_and_says_what_was_checked():
    """The counts tell a thorough run from an empty one."""
    findings = Tree().findings()

    assert {f.severity for f in findings} == {"info"}
    checks = {"syntax", "hooks", "imports", "calls", "attributes", "sites", "mirrors", "grounds"}
    assert {f.check for f in findings} == checks
    count = sum(len(edit.insertions) for edit in small.RELEASE.edits)
    assert any(f"{count} insertions in {len(small.RELEASE.edits)} files" in f.message for f in findings)
    assert not any(f.message.startswith("0 ") for f in findings)


def test_syntax_error_is_found_with_its_line():
    """A module that does not compile stops the checks that would read it, and no other is blamed."""
    tree = Tree()
    patched = edited(tree.patched(), ARGS, "-> int:", "-> int")

    (found,) = tree.errors(patched)

    assert (found.check, found.path) == ("syntax", ARGS)
    assert found.line is not None


def test_other_python_is_left_to_the_host():
    """What this Python accepts says nothing about the target's."""
    tree = Tree()
    patched = edited(tree.patched(), ARGS, "-> int:", "-> int")
    versions = {"sglang": "0.5.11", "python": "3.9.1"}

    found = [f for f in tree.findings(versions=versions) if f.check == "syntax"]

    assert [f.severity for f in found] == ["info"]
    assert "3.9.1" in found[0].message
    same = {"sglang": "0.5.11", "python": platform.python_version()}
    assert [f.check for f in tree.errors(patched, versions=same)] == ["syntax"]


def test_dropped_upstream_line_is_found():
    """Insertion-only is checked on the result, not believed."""
    tree = Tree()
    patched = edited(tree.patched(), SERVER_ARGS, '        parser.add_argument("--other")\n', "")

    found = tree.errors(patched)

    assert {f.check for f in found} == {"structure"}
    assert any("did not survive" in f.message and "--other" in f.message and f.line for f in found)


def test_changed_upstream_line_is_found():
    """So is a line that only looks the same."""
    tree = Tree()
    patched = edited(tree.patched(), SERVER_ARGS, 'or "fa3"', "or 'fa3'")

    assert {f.check for f in tree.errors(patched)} == {"structure"}


def test_added_line_that_no_edit_declares_is_found():
    """All upstream lines survive, yet the file no longer comes apart."""
    tree = Tree()
    patched = edited(tree.patched(), SERVER_ARGS, "class ServerArgs:\n", "class ServerArgs:\n    more: int = 0\n")

    (found,) = tree.errors(patched)

    assert (found.check, found.message) == ("structure", "unpatching does not give the base bytes")


@pytest.mark.parametrize(
    ("path", "old", "new", "message"),
    [
        (WORKER, "        return draft_next", "        is_dflash()\n        return draft_next", "`is_dflash()`"),
        (SERVER_ARGS, "= 16\n", '= 16\n        x = "DFLASH"\n', '`"DFLASH"`'),
        ("srt/utils/common.py", "    return model", "    return model.speculative_eagle_topk", "in wrap"),
    ],
)
def test_unknown_site_is_found(path: str, old: str, new: str, message: str):
    """A new mention, also of a known kind in a known scope, with its line."""
    (found,) = Tree().change(path, old, new).errors()

    assert (found.check, found.path) == ("sites", path)
    assert "nobody has classified" in found.message
    assert message in found.message
    assert found.line


def test_vanished_site_is_found():
    """A table that speaks of code that is gone is out of date."""
    tree = Tree().change(
        "srt/speculative/spec_info.py", "            return DFlashWorker\n", "            return None\n"
    )

    (found,) = tree.errors()

    assert found.check == "sites"
    assert "but gone: `DFlashWorker`" in found.message


def test_mention_outside_the_snapshot_is_found():
    """A file that the snapshot knows of and does not hold was not checked."""
    (found,) = Tree().errors(mentions=("srt/unseen.py",))

    assert (found.check, found.path) == ("sites", "srt/unseen.py")


def test_comments_docstrings_messages_and_layout_are_no_sites():
    """Only code decides anything."""
    tree = Tree()
    tree.change("srt/utils/common.py", "    return model", '    """About DFLASH."""\n    # DFLASH\n    return model')
    tree.change(
        "srt/server_args.py",
        '        if self.speculative_algorithm == "DFLASH"',
        '\n\n        if self.speculative_algorithm == "DFLASH"',
    )
    tree.change(
        WORKER,
        "        return draft_next",
        '        print(f"DFLASH {batch}", "no DFLASH here")\n        return draft_next',
    )

    assert tree.errors() == []


@pytest.fixture(scope="module")
def published():
    return wheels.snapshot(wanted_paths(load_overlay()))


@pytest.mark.parametrize("version", SUPPORTED_RELEASES)
def test_real_overlay_holds_on_the_published_wheel(version: str):
    """Not one error, for any release."""
    manifest, base = wheels.snapshot(wanted_paths(), version)

    findings = verify_bundle(manifest, base, build(base, version))

    assert [f for f in findings if f.severity != "info"] == []


def test_renames_in_the_published_wheel_are_found(published):
    """The real overlay depends on real names, and says so when they go."""
    manifest, base = published
    patched = build(base, "0.5.11")
    changed = dict(base)
    for path, old, new in (
        ("srt/speculative/spec_utils.py", b"def assign_req_to_token_pool_func", b"def assign_rows_func"),
        ("srt/speculative/dflash_utils.py", b"resolve_dflash_verify_mask_policy", b"resolve_dflash_mask_policy"),
    ):
        assert old in changed[path]
        changed[path] = changed[path].replace(old, new)

    found = [f for f in verify_bundle(manifest, changed, patched) if f.severity == "error"]

    assert {"imports", "sites"} <= {f.check for f in found}
    assert any("assign_req_to_token_pool_func" in f.message for f in found if f.check == "imports")


def test_bundle_of_an_unknown_release_is_refused(published):
    """There is no table to verify it by."""
    manifest, base = published

    with pytest.raises(Exception, match=r"SGLang 9\.9 is not supported"):
        verify_bundle(manifest, base, Patched(Bundle("9.9", ()), {}))
