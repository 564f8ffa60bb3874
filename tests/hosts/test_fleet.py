# SPDX-License-Identifier: Apache-2.0
"""What a host does for a push to several: files are staged and checked first, and swapped without a second transfer."""

from __future__ import annotations

import fcntl
import os
import secrets
import time

import pytest
from tests.support.fleets import RESULTS
from tests.support.installs import bundle_for
from tests.support.sshd import SshServer
from tests.support.trees import differences, listing
from tests.support.wheels import CACHE

from ddtree_overlay import deploy, members
from ddtree_overlay.errors import ConflictError, LockedError, OverlayError, UsageError
from ddtree_overlay.hosts.transport import open_transport


@pytest.fixture
def staged(tiny, near):
    """A push that is staged on a host: the plan, its files, the arguments, and the name of the stage."""
    bundle, files = bundle_for(tiny.root, RESULTS)
    plan = deploy.plan_push(near, bundle, files)
    args, payload = deploy.push_request(plan, files, operator="x", lock_wait=0)
    name = secrets.token_hex(8)
    before = listing(tiny.site)
    near.call("stage", {**args, "stage": name}, payload)
    return plan, files, name, before


def test_a_stage_changes_nothing_that_python_or_the_status_sees(tiny, near, staged):
    """The bytes lie in the state folder only; the package is as it was, and nobody holds the lock."""
    _, files, name, before = staged
    added = differences(before, listing(tiny.site))
    assert all(line.split()[:2][1].startswith(".ddtree-overlay") for line in added)
    assert {p: (tiny.state / "stage" / name / p).read_bytes() for p in files} == files
    found = deploy.status(near)
    assert (found.state, found.unfinished) == ("pristine", "")


def test_a_stage_that_is_not_used_leaves_no_byte(tiny, near, staged):
    """Taken away again, not even the state folder is left where there was none."""
    _, _, name, before = staged
    near.call("unstage", {"stage": name, "operator": "x", "lock_wait": 0})
    assert differences(before, listing(tiny.site)) == []


def test_a_push_takes_the_bytes_from_its_stage(tiny, near, staged):
    """Nothing is transferred a second time, and the stage is gone afterwards."""
    plan, files, name, _ = staged
    sent = []
    call = near.call
    near.call = lambda op, args, payload=b"", **k: (sent.append((op, len(payload))), call(op, args, payload, **k))[1]
    assert deploy.push(near, plan, files, operator="x", stage=name).id == "d-0001"
    assert sent == [("push", 0)]
    assert {p: (tiny.root / p).read_bytes() for p in RESULTS} == RESULTS
    assert not (tiny.state / "stage").exists()


def test_a_push_whose_stage_was_taken_away_does_not_begin(tiny, near, staged):
    """A push whose answer was lost cannot come late, after the fleet has been put back."""
    plan, files, name, before = staged
    near.call("unstage", {"stage": name, "operator": "x", "lock_wait": 0})
    with pytest.raises(ConflictError, match="not as they were staged"):
        deploy.push(near, plan, files, operator="x", stage=name)
    assert differences(before, listing(tiny.site)) == []


def test_a_deployment_of_somebody_else_is_never_taken_for_ours(tiny, near, staged):
    """The same overlay came first by another hand: refused, so that no failure elsewhere can put that one back."""
    plan, files, name, _ = staged
    deploy.push(near, plan, files, operator="ann@desk")
    before = listing(tiny.root)
    with pytest.raises(ConflictError, match="ann@desk has pushed the same overlay meanwhile, as d-0001"):
        deploy.push(near, plan, files, operator="x", stage=name)
    assert differences(before, listing(tiny.root)) == []


def test_a_stage_that_was_changed_is_refused(tiny, near, staged):
    """Its digests are checked when it is used, not only when it is written."""
    plan, files, name, _ = staged
    before = listing(tiny.root)
    (tiny.state / "stage" / name / "srt/a.py").write_bytes(b"VALUE = 0\n")
    with pytest.raises(ConflictError, match=r"srt/a\.py was changed"):
        deploy.push(near, plan, files, operator="x", stage=name)
    assert differences(before, listing(tiny.root)) == []


def stage(transport, root, results):
    bundle, files = bundle_for(root, results)
    plan = deploy.plan_push(transport, bundle, files)
    args, payload = deploy.push_request(plan, files, operator="x", lock_wait=0)
    return lambda: transport.call("stage", {**args, "stage": secrets.token_hex(8)}, payload)


def test_what_would_stop_a_push_stops_its_stage(tiny, near):
    """Code that does not compile, a stale plan, a held lock: refused before any host is swapped; no trace."""
    before = listing(tiny.site)
    with pytest.raises(OverlayError, match=r"srt/a\.py:1: "):
        stage(near, tiny.root, {"srt/a.py": b"return 3\n"})()
    later = stage(near, tiny.root, RESULTS)
    (tiny.root / "srt/b.py").write_bytes(b"VALUE = 3\n")
    with pytest.raises(ConflictError, match="plan is stale"):
        later()
    (tiny.root / "srt/b.py").write_bytes(b"VALUE = 2\n")
    assert differences(before, listing(tiny.site)) == []
    tiny.state.mkdir()
    with (tiny.state / "lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(LockedError):
            later()
    later()


def test_a_host_without_an_exact_way_back_refuses_its_stage(tiny, near):
    """Reinstalled under d-0001: going back to d-0001 would not be what is there now, so nothing is begun."""
    bundle, files = bundle_for(tiny.root, RESULTS)
    second = bundle_for(tiny.root, {"srt/a.py": b"VALUE = 7\n"})
    deploy.push(near, deploy.plan_push(near, bundle, files), files, operator="x")
    (tiny.root / "srt/b.py").write_bytes(b"VALUE = 2\n")
    before = listing(tiny.root)
    args, payload = deploy.push_request(deploy.plan_push(near, *second), second[1], operator="x", lock_wait=0)
    with pytest.raises(ConflictError, match=r"not as d-0001 left it: srt/b\.py was changed"):
        near.call("stage", {**args, "stage": secrets.token_hex(8)}, payload)
    assert differences(before, listing(tiny.root)) == []
    assert not (tiny.state / "stage").exists()


def test_a_stage_that_was_left_behind_goes_with_the_next_push(tiny, near):
    """A day later nobody comes back for it; one that is younger may still be waited for."""
    stage(near, tiny.root, RESULTS)()
    stage(near, tiny.root, RESULTS)()
    (old, young) = sorted((tiny.state / "stage").iterdir())
    os.utime(old, (time.time() - 2 * 86400,) * 2)
    bundle, files = bundle_for(tiny.root, RESULTS)
    deploy.push(near, deploy.plan_push(near, bundle, files), files, operator="x")
    assert list((tiny.state / "stage").iterdir()) == [young]


@pytest.mark.usefixtures("namespaces")
def test_two_names_of_one_package_are_noticed_in_other_mount_namespaces(tiny, tmp_path, sshd):
    """A container's name and its host's, with other paths: the kernel and the folder tell, ids of machines do not."""
    other = tmp_path / "elsewhere"
    other.mkdir()
    venv = tiny.python.parents[1]
    with SshServer.start(tmp_path / "sshd", CACHE, namespace=f"mount --bind '{venv}' '{other}'") as server:
        names = {
            "outside": sshd.host("outside", str(tiny.python)),
            "inside": server.host("inside", f"{other}/bin/python"),
        }
        seen = {}
        for name, host in names.items():
            with open_transport(host) as transport:
                seen[name] = transport.call("survey", {}).result
    assert seen["outside"]["root"] != seen["inside"]["root"]
    with pytest.raises(UsageError, match="outside and inside are the same SGLang"):
        members.refuse_twins((name, tuple(result["place"])) for name, result in seen.items())


def test_one_command_that_comes_by_another_road_is_noticed_by_its_stage(tiny, near):
    """Two machines that share a folder over the network look different; the second stage meets the first."""
    bundle, files = bundle_for(tiny.root, RESULTS)
    plan = deploy.plan_push(near, bundle, files)
    args, payload = deploy.push_request(plan, files, operator="x", lock_wait=0)
    near.call("stage", {**args, "stage": "0123456789abcdef"}, payload)
    with pytest.raises(OverlayError, match="named twice"):
        near.call("stage", {**args, "stage": "0123456789abcdef"}, payload)
    assert (tiny.state / "stage/0123456789abcdef/srt/a.py").exists()
