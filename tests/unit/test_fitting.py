# SPDX-License-Identifier: Apache-2.0
"""How an SGLang that nobody knows is told apart from the release it is nearest to."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support import wheels

from ddtree_overlay import fitting
from ddtree_overlay.fit_reports import fit_lines
from ddtree_overlay.patching import AlreadyPatchedError, build_release, modules_of, wanted_paths
from ddtree_overlay.releases import KNOWN, known
from ddtree_overlay.reports import plain


NEWEST = KNOWN[-1]


def like(version: str, *, but: str):
    """The published files of `version`, as a release called `but`."""
    manifest, base = wheels.snapshot(wanted_paths(), version)
    return replace(manifest, versions={**manifest.versions, "sglang": but}), dict(base)


@pytest.mark.parametrize(
    ("version", "row"),
    [
        ("0.5.12", "0.5.12"),
        ("0.5.12.post1", "0.5.12.post1"),
        ("0.5.12.post2", "0.5.12.post1"),
        ("0.5.13rc1", "0.5.12.post1"),
        ("0.5.13.dev20260101+gabc1234", "0.5.12.post1"),
        ("0.5.13.post1", "0.5.13"),
        ("0.5.99", NEWEST.version),
        ("1.0", NEWEST.version),
        ("0.5.10", KNOWN[0].version),
    ],
)
def test_nearest_row_is_the_newest_before(version: str, row: str):
    """A release candidate comes before its release, a post-release after it."""
    assert fitting.nearest(version).version == row


def test_release_that_differs_in_name_only_fits():
    """Nothing is left to do but to add its row, and the report says so."""
    found = fitting.fit(*like("0.5.12.post1", but="0.5.12.post2"))

    assert found.complete
    assert (found.version, found.based_on, found.supported) == ("0.5.12.post2", "0.5.12.post1", False)
    said = [plain(line) for line in fit_lines(found)]
    assert said[0] == "SGLang 0.5.12.post2  is not supported; tried with the row of 0.5.12.post1"
    assert said[-1] == "fits: nothing left but its row in releases.py"


def test_what_does_not_fit_is_named_one_by_one():
    """A moved anchor with its nearest lines, a file that is gone, and a new site: each by itself."""
    manifest, base = like("0.5.13", but="0.5.13.post1")
    hook, mixin, utils = (
        "srt/arg_groups/speculative_hook.py",
        "srt/model_executor/model_runner_kv_cache_mixin.py",
        "srt/speculative/dflash_utils.py",
    )
    base[hook] = base[hook].replace(b'algorithm == "DFLASH":', b'algorithm in ("DFLASH",):')
    base["srt/mem_cache/model_runner_kv_cache_mixin.py"] = base.pop(mixin)
    base[utils] += b'\n\ndef is_chain(algorithm):\n    return algorithm == "DFLASH"\n'

    found = fitting.fit(manifest, base)

    wrong = {edit.edit.path: edit for edit in found.edits if not edit.fits}
    assert set(wrong) == {hook, mixin}
    (misfit,) = wrong[hook].misfits
    assert misfit.error.wanted == 'if server_args.speculative_algorithm == "DFLASH": ...'
    assert any('in ("DFLASH",)' in text for _, text in misfit.error.places)
    assert all(
        base[hook].split(b"\n")[line - 1].strip().startswith(text.encode()[:20]) for line, text in misfit.error.places
    )
    assert wrong[mixin].missing
    assert wrong[mixin].moved == ("srt/mem_cache/model_runner_kv_cache_mixin.py",)
    errors = [f for f in found.findings if f.severity == "error"]
    assert any(f.check == "sites" and f.path == utils and "is_chain" in f.message for f in errors)
    assert not found.complete
    assert plain(fit_lines(found)[-1]).startswith("does not fit: 2 edits and ")


def test_a_step_of_dflash_that_has_learnt_something_is_found():
    """The tree's step, which stands in its place, may have to learn it."""
    manifest, base = like("0.5.13", but="0.5.13.post1")
    info = "srt/speculative/dflash_info.py"
    base[info] = base[info].replace(b"if batch.forward_mode.is_idle():", b"if not self.draft_token.numel():", 1)

    found = fitting.fit(manifest, base)

    assert all(edit.fits for edit in found.edits)
    assert {(f.check, f.path) for f in found.findings if f.severity == "error"} == {("mirrors", info)}


def test_names_that_the_overlay_uses_are_looked_up():
    """A function that was renamed is found, though every insertion has its place."""
    manifest, base = like("0.5.13", but="0.5.13.post1")
    sampler = "srt/layers/sampler.py"
    base[sampler] = base[sampler].replace(b"def apply_custom_logit_processor(", b"def run_custom_logit_processor(")

    found = fitting.fit(manifest, base)

    assert all(edit.fits for edit in found.edits)
    assert [f.path for f in found.findings if f.severity == "error"] == ["srt/speculative/ddtree/targets.py"]
    assert not found.complete


def test_edit_of_another_release_that_fits_is_named():
    """Code that moved back, or as in another line, needs a row and no codemod."""
    found = fitting.fit(*like("0.5.12", but="0.5.13.post1"), names_and_sites=False)

    args = next(edit for edit in found.edits if edit.edit.path == "srt/arg_groups/speculative_hook.py")
    assert args.missing
    mixin = next(e for e in found.edits if e.edit.path == "srt/model_executor/model_runner_kv_cache_mixin.py")
    assert {"0.5.11", "0.5.12", "0.5.12.post1"} <= set(mixin.elsewhere)
    assert found.findings == ()


def test_patched_base_is_refused():
    """What holds the overlay says nothing about a release."""
    row = known("0.5.13")
    manifest, base = like("0.5.13", but="0.5.13.post1")
    patched = build_release(row, base, modules_of(row))

    with pytest.raises(AlreadyPatchedError):
        fitting.fit(manifest, {**base, **patched.files})


@pytest.mark.parametrize("row", KNOWN, ids=lambda row: row.version)
def test_every_edit_of_the_table_fits_its_release(row):
    """Pending or supported: no insertion of the table is without its place."""
    found = fitting.fit(*wheels.snapshot(wanted_paths(), row.version), names_and_sites=False)

    assert [edit.edit.path for edit in found.edits if not edit.fits] == []
    assert found.based_on == row.version
