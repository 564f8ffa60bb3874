# SPDX-License-Identifier: Apache-2.0
"""Old backups go, and never one that somebody could want to go back to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.crashes import Direct
from tests.support.installs import bundle_for, tiny_package
from tests.support.trees import differences, listing

from ddtree_overlay import deploy
from ddtree_overlay.errors import OverlayError
from ddtree_overlay.remote import pruning


@pytest.fixture
def site(tmp_path):
    tiny_package(tmp_path / "site", "0.5.11")
    return tmp_path / "site"


@pytest.fixture
def near(site):
    return Direct(str(site / "sglang"))


def push(near, site, value):
    """Push an overlay that is made from the pristine package, whatever is live."""
    if not (site.parent / "pristine").exists():
        tiny_package(site.parent / "pristine", "0.5.11")
    results = {"srt/a.py": b"VALUE = %d\n" % value, "srt/new/c.py": b"C = %d\n" % value}
    bundle, files = bundle_for(site.parent / "pristine/sglang", results)
    return deploy.push(near, deploy.plan_push(near, bundle, files), files, operator="x")


def kept(site):
    return sorted(p.name for p in (site / ".ddtree-overlay/deployments").iterdir())


def event(kind, name, current, before=None, **more):
    return {"event": kind, "id": name, "current": current, "before": before, **more}


def names(*numbers):
    return [f"d-{n:04d}" for n in numbers]


def test_a_good_deployment_outlives_any_number_of_bad_ones():
    """One good, five that failed, keep three: the good one is kept, and rollback still finds it (capistrano#2120)."""
    good, bad = names(1)[0], names(2, 3, 4, 5, 6)
    events = [event("push", good, good), event("good", good, good)]
    for name in bad:
        events += [event("push", name, name, good), event("rollback", name, good, name)]
    previous = dict.fromkeys(bad, good) | {good: None}
    assert pruning.prunable(events, previous, good, 3) == names(2, 3)
    # Nor does it go when it is not live itself.
    events += [event("rollback", good, None, good)]
    assert pruning.prunable(events, previous, None, 3) == names(2, 3, 4)


def test_the_way_back_is_kept_as_far_as_it_was_promised():
    """Of a chain of pushes the last ones stay, and never the live one's predecessor goes."""
    chain = names(*range(1, 30))
    previous = dict(zip(chain, [None, *chain[:-1]], strict=True))
    events = [event("push", n, n, previous[n]) for n in chain]
    assert pruning.prunable(events, previous, chain[-1], 3) == chain[:-7]
    assert chain[-2] not in pruning.prunable(events, previous, chain[-1], 1)


@given(st.lists(st.sampled_from(["push", "good", "bad", "rollback", "failed"]), max_size=40), st.integers(1, 4))
def test_pruning_is_bounded_and_keeps_what_matters(kinds, keep):
    """Whatever happened: the live one and its predecessor stay, the newest good one stays, and few others do."""
    events, previous, current, number = [], {}, None, 0
    for kind in kinds:
        if kind in ("push", "failed"):
            number += 1
            name = f"d-{number:04d}"
            previous[name] = current
            of = {"of": "push"} if kind == "failed" else {}
            events.append(event(kind, name, current if of else name, current, **of))
            current = events[-1]["current"]
        elif current and kind == "rollback":
            events.append(event(kind, current, previous[current], current))
            current = previous[current]
        elif current:
            events.append(event(kind, current, current, current))
    gone = pruning.prunable(events, previous, current, keep)
    left = previous.keys() - set(gone)
    assert len(left) <= 2 * keep + 1
    assert {current, previous.get(current)} - {None} <= left
    good = sorted(n for n, s in pruning.states(events).items() if s == "good")
    assert set(good[-1:]) <= left
    assert pruning.prunable(events, {n: previous[n] for n in left}, current, keep) == []


def test_many_pushes_leave_a_bounded_state_folder(near, site):
    """Thirty pushes on top of each other: 21 are kept, the history tells of all, and the way back ends well."""
    before = listing(site)
    for value in range(10, 40):
        push(near, site, value)
    assert kept(site) == names(*range(10, 31))
    history = deploy.history(near)
    assert [d.id for d in history] == names(*range(1, 31))
    assert (history[0].files, history[0].release, history[0].note) == (2, "0.5.11", "its backups were pruned")
    for number in range(29, 9, -1):
        assert deploy.rollback(near).to == f"d-{number:04d}"
    with pytest.raises(OverlayError, match=r"d-0009, which was live before d-0010, was pruned") as caught:
        deploy.rollback(near)
    assert "--to base" in caught.value.next_step
    with pytest.raises(OverlayError, match="d-0003 is not below the live deployment"):
        deploy.rollback(near, to="d-0003")
    deploy.rollback(near, to="base", purge=True)
    assert differences(before, listing(site)) == []
