# SPDX-License-Identifier: Apache-2.0
"""Plans are pure functions of digests: laws that hold for any base, any overlays and any meddling in between."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ddtree_overlay.remote import planning


PATHS = ["a", "b", "c", "d"]
DIGESTS = st.sampled_from(["1" * 12, "2" * 12, "3" * 12])
TREES = st.fixed_dictionaries({p: st.none() | DIGESTS for p in PATHS})
#: Results are marked, so that no overlay gives a file the digest that it had before.
OVERLAYS = st.dictionaries(st.sampled_from(PATHS), DIGESTS.map(lambda d: f"new-{d}"), min_size=1)


def changes_for(base, overlay):
    return [{"path": p, "base": base[p], "after": d} for p, d in sorted(overlay.items())]


def carried_out(live, actions):
    """The tree after `actions`; the agent insists that every `from` is what is there."""
    assert all(live[a["path"]] == a["from"] for a in actions)
    return {**live, **{a["path"]: a["to"] for a in actions}}


def record_of(name, changes):
    return {"id": name, "version": "1", "files": {c["path"]: {"base": c["base"], "after": c["after"]} for c in changes}}


@given(TREES, OVERLAYS)
def test_push_makes_the_overlay_and_a_second_one_does_nothing(base, overlay):
    """Idempotent by construction (openrewrite#487); files that the overlay does not name stay as they are."""
    changes = changes_for(base, overlay)
    live = carried_out(base, planning.plan_push(changes, base, None))
    assert live == {**base, **overlay}
    again = planning.plan_push(changes, live, record_of("d-0001", changes))
    assert {a["action"] for a in again} == {"same"}


@given(TREES, TREES, st.lists(OVERLAYS, min_size=2, max_size=4))
def test_bundle_is_chosen_by_the_digests_of_the_host(base, other, overlays):
    """The first bundle for the base that is there is meant, whichever of its overlays is in place; none for another."""
    candidates = [changes_for(base, overlay) for overlay in overlays]
    here = [sorted((c["path"], c["base"]) for c in changes if c["base"]) for changes in candidates]
    for at, there in enumerate(overlays):
        for live in (base, {**base, **there}):
            chosen = planning.choose(candidates, live)
            assert chosen is not None
            assert chosen <= at
            # Some overlay for the base of the chosen one is what `live` can be explained by.
            fits = [all(live[p] in (base[p], d) for p, d in overlay.items()) for overlay in overlays]
            assert any(fit and where == here[chosen] for fit, where in zip(fits, here, strict=True))
    strange = {p: f"strange-{d}" for p, d in other.items()}
    assert planning.choose(candidates, strange) is None


@given(TREES, OVERLAYS, OVERLAYS)
def test_an_overlay_replaces_another_and_rollback_goes_through_both(base, first, second):
    """The second overlay is what it would be on the bare base; one step back is the first, the last one the base."""
    one, two = changes_for(base, first), changes_for(base, second)
    after_one = carried_out(base, planning.plan_push(one, base, None))
    record_one, record_two = record_of("d-0001", one), record_of("d-0002", two)
    after_two = carried_out(after_one, planning.plan_push(two, after_one, record_one))
    assert after_two == {**base, **second}
    back, left = planning.plan_rollback(record_two, record_one, after_two, replaced=False)
    assert (carried_out(after_two, back), left) == (after_one, [])
    whole, left = planning.plan_rollback(record_two, None, after_two, replaced=False)
    assert (carried_out(after_two, whole), left) == (base, [])


@given(TREES, OVERLAYS, TREES)
def test_what_others_changed_is_never_overwritten(base, overlay, meddled):
    """A file that is neither base nor ours is a conflict in a push as in a rollback, and only such a file is."""
    changes = changes_for(base, overlay)
    foreign = {c["path"] for c in changes if meddled[c["path"]] not in (c["base"], c["after"])}
    pushed = planning.plan_push(changes, meddled, None)
    assert {a["path"] for a in pushed if a["action"] == "conflict"} == foreign
    back, _ = planning.plan_rollback(record_of("d-0001", changes), None, meddled, replaced=False)
    assert {a["path"] for a in back if a["action"] == "conflict"} == foreign
    back, left = planning.plan_rollback(record_of("d-0001", changes), None, meddled, replaced=True)
    assert (set(left), [a for a in back if a["action"] == "conflict"]) == (foreign, [])


@given(TREES, OVERLAYS, TREES)
def test_status_counts_every_file_once(base, overlay, live):
    """Each file of the overlay has exactly one state, and `applied` means that all of them are ours."""
    record = record_of("d-0001", changes_for(base, overlay))
    mixed = {p: overlay[p] if p in overlay and d is None else d for p, d in live.items()}
    state, reason, files = planning.classify(record, mixed, "1", importable=True)
    assert [f["path"] for f in files] == sorted(overlay)
    assert (state == "applied") == all(mixed[p] == overlay[p] for p in overlay)
    assert not any(wrong in reason for wrong in ("1 files", " 1 file are", "file(s)"))


def test_status_speaks_of_one_file_as_of_one():
    """The sentences are read by people: `1 file … is`, `2 files … are`."""
    record = {"id": "d-0001", "version": "1", "files": {p: {"base": "b", "after": "a"} for p in "xy"}}

    def said(live, version="1", *, importable=True):
        return planning.classify(record, live, version, importable=importable)[1]

    assert said({"x": "a", "y": "a"}) == "all 2 files of d-0001 are in place"
    assert said({"x": "a", "y": "?"}) == "1 file out of 2 is neither the base nor as d-0001 left it"
    assert said({"x": "?", "y": "?"}) == "2 files out of 2 are neither the base nor as d-0001 left it"
    assert said({"x": "a", "y": "b"}) == "1 file of d-0001, out of 2, is not in place (reinstalled underneath?)"
    assert said({"x": "a", "y": None}, importable=False) == "SGLang was uninstalled; 1 file of d-0001 is left over"
