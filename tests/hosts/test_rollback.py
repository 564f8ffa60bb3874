# SPDX-License-Identifier: Apache-2.0
"""Rollback, status and history: back to exactly what was there, and the truth about what is there now."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.support.installs import ADDED, EDITED, bundle_for, overlay_for, tiny_package
from tests.support.trees import differences, listing
from tests.support.waiting import HANG

from ddtree_overlay import deploy
from ddtree_overlay.errors import ConflictError, OverlayError
from ddtree_overlay.hosts.transport import open_transport


RESULTS = {"srt/a.py": b"VALUE = 5\n", "srt/new/c.py": b"C = 1\n"}


def pushed(transport, bundle, files):
    return deploy.push(transport, deploy.plan_push(transport, bundle, files), files, operator="tester@desk")


def replace_file(path, data):
    """Put another file in place, as an editor or an installer does."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def test_rollback_gives_back_bytes_modes_times_and_absence(sglang, here):
    """Every file is as it was before; new files and the folder made for them are gone."""
    # A file of its own: the mode belongs to the inode, which the wheel's cache shares.
    replace_file(sglang.root / EDITED[1], (sglang.root / EDITED[1]).read_bytes())
    os.chmod(sglang.root / EDITED[1], 0o640)
    before = listing(sglang.root)
    times = {p: (sglang.root / p).stat().st_mtime_ns for p in EDITED}
    pushed(here, *overlay_for(sglang.root))
    plan = deploy.plan_rollback(here)
    assert (plan.current, plan.to, plan.undoes, plan.counts()["remove"]) == ("d-0001", "base", ("d-0001",), 2)
    done = deploy.rollback(here, plan=plan, operator="x")
    assert (done.undone, done.restored, done.removed, done.directories) == (("d-0001",), 2, 2, 1)
    assert (done.verified, done.purged) == (4, False)
    assert differences(before, listing(sglang.root)) == []
    assert {p: (sglang.root / p).stat().st_mtime_ns for p in EDITED} == times


def test_purge_leaves_not_one_byte(sglang, here):
    """Backups and history go too; files and modes are as if nothing had ever happened."""
    before = listing(sglang.site)
    pushed(here, *overlay_for(sglang.root))
    assert sglang.state.is_dir()
    assert deploy.rollback(here, purge=True).purged
    assert differences(before, listing(sglang.site)) == []


def test_purge_after_a_plain_rollback(tiny, near):
    """History can be removed later as well; without anything left it is a no-op."""
    before = listing(tiny.site)
    pushed(near, *bundle_for(tiny.root, RESULTS))
    deploy.rollback(near)
    assert tiny.state.is_dir()
    assert not deploy.plan_rollback(near, purge=True).is_noop
    assert deploy.rollback(near, purge=True).purged
    assert deploy.plan_rollback(near, purge=True).is_noop
    assert differences(before, listing(tiny.site)) == []


def test_pushes_and_purges_at_the_same_time_are_one_after_the_other(tiny):
    """Of equal pushes one does it, of equal purges one does it; nothing is left of the others (kamal#1930)."""
    before = listing(tiny.site)
    bundle, files = bundle_for(tiny.root, RESULTS)
    with open_transport(tiny.host()) as transport:
        plan = deploy.plan_push(transport, bundle, files)

    def attempt(action):
        try:
            with open_transport(tiny.host()) as transport:
                return action(transport)
        except ConflictError:
            return None

    with ThreadPoolExecutor(4) as pool:
        pushes = [lambda t: deploy.push(t, plan, files, operator="x", lock_wait=HANG).id] * 4
        # Those who waited find their overlay in place.
        assert set(pool.map(attempt, pushes)) == {"d-0001"}
        purges = [lambda t: deploy.rollback(t, purge=True, lock_wait=HANG).undone] * 4
        assert sorted(filter(None, pool.map(attempt, purges))) == [("d-0001",)]
    assert differences(before, listing(tiny.site)) == []


def test_nothing_to_roll_back(tiny, near):
    """On a pristine host it is a no-op that writes nothing."""
    before = listing(tiny.site)
    assert deploy.plan_rollback(near).is_noop
    assert deploy.rollback(near).undone == ()
    assert differences(before, listing(tiny.site)) == []


def test_rollback_refuses_to_lose_a_later_edit(tiny, near):
    """A file edited after the push is a conflict; nothing is written."""
    pushed(near, *bundle_for(tiny.root, RESULTS))
    replace_file(tiny.root / "srt/a.py", b"VALUE = 77\n")
    before = listing(tiny.site)
    with pytest.raises(ConflictError, match="going back would lose that"):
        deploy.rollback(near)
    assert differences(before, listing(tiny.site)) == []


def test_a_stale_rollback_plan_is_refused(tiny, near):
    """Exactly the plan is carried out: a file that changes after it was made stops it."""
    pushed(near, *bundle_for(tiny.root, RESULTS))
    plan = deploy.plan_rollback(near)
    replace_file(tiny.root / "srt/a.py", b"VALUE = 1\n")
    with pytest.raises(ConflictError, match="plan is stale"):
        deploy.rollback(near, plan=plan)


def test_a_damaged_backup_is_noticed_before_anything_is_written(tiny, near):
    """The kept base is hashed first; a rollback never puts back something else."""
    pushed(near, *bundle_for(tiny.root, RESULTS))
    replace_file(tiny.state / "deployments/d-0001/base/srt/a.py", b"rotten")
    before = listing(tiny.site)
    with pytest.raises(OverlayError, match=r"backup of srt/a\.py is missing or damaged"):
        deploy.rollback(near)
    assert differences(before, listing(tiny.site)) == []


def test_rollback_to_an_id(tiny, near):
    """`to` names a deployment below the live one, or `base`; anything else is refused with the choices."""
    for value in (5, 6, 7):
        files = {"srt/a.py": b"VALUE = %d\n" % value}
        base, _ = bundle_for(tiny.root, files)
        change = base.changes[0]
        first = deploy.history(near)
        if first:
            original = (tiny.state / "deployments/d-0001/base/srt/a.py").read_bytes()
            change = bundle_base(change, original)
        pushed(near, type(base)(base.release, (change,)), files)
    with pytest.raises(OverlayError, match="d-0009 is not below the live deployment") as caught:
        deploy.plan_rollback(near, to="d-0009")
    assert "d-0003, d-0002, d-0001, base" in caught.value.why
    assert deploy.rollback(near, to="d-0001").undone == ("d-0003", "d-0002")
    assert (tiny.root / "srt/a.py").read_bytes() == b"VALUE = 5\n"
    assert deploy.rollback(near, to="base").undone == ("d-0001",)
    assert (tiny.root / "srt/a.py").read_bytes() == b"VALUE = 1\n"


def bundle_base(change, original):
    from dataclasses import replace

    from ddtree_overlay.manifest import sha256

    return replace(change, base_sha256=sha256(original))


def test_history_is_a_chain(tiny, near):
    """Ids are never used twice, undone deployments stay listed, and one at most is live."""
    for value in (5, 6):
        pushed(near, *bundle_for(tiny.root, {"srt/a.py": b"VALUE = %d\n" % value}))
        deploy.rollback(near)
    pushed(near, *bundle_for(tiny.root, RESULTS))
    found = deploy.history(near)
    assert [d.id for d in found] == ["d-0001", "d-0002", "d-0003"]
    assert [d.current for d in found] == [False, False, True]
    assert [d.undone is None for d in found] == [False, False, True]
    assert [d.time for d in found] == sorted(d.time for d in found)


def test_bytecode_is_stale_neither_after_push_nor_after_rollback(tiny, near):
    """What was compiled from the overlay is gone after a rollback, in the folder made for it too."""
    read = "import sglang.srt.a as a, sglang.srt; print(a.VALUE)"
    pushed(near, *bundle_for(tiny.root, RESULTS))
    assert tiny.run(f"{read}; import sglang.srt.new.c") == "5"
    assert list(tiny.root.rglob("c.*.pyc"))
    deploy.rollback(near)
    assert not (tiny.root / "srt/new").exists()
    assert not list(tiny.root.rglob("a.*.pyc"))
    assert tiny.run(read) == "1"


def test_status_pristine_and_applied(sglang, here):
    """The two states of a healthy host."""
    found = deploy.status(here)
    assert (found.state, found.deployment, found.version, found.files) == ("pristine", None, "0.5.11", ())
    bundle, files = overlay_for(sglang.root)
    pushed(here, bundle, files)
    found = deploy.status(here)
    assert (found.state, found.overlay_id) == ("applied", bundle.overlay_id)
    assert {f.path: f.state for f in found.files} == dict.fromkeys(files, "ours")
    deploy.rollback(here)
    assert deploy.status(here).state == "pristine"


def test_status_drifted(tiny, near):
    """A file that is neither base nor overlay is named."""
    pushed(near, *bundle_for(tiny.root, RESULTS))
    replace_file(tiny.root / "srt/a.py", b"VALUE = 77\n")
    found = deploy.status(near)
    assert (found.state, [f.path for f in found.files if f.state == "foreign"]) == ("drifted", ["srt/a.py"])


def test_status_partial_after_a_reinstall_and_push_repairs_it(tiny, near):
    """A reinstall of the same version puts the base back and leaves our new files; the next push mends that."""
    before = listing(tiny.root)
    bundle, files = bundle_for(tiny.root, RESULTS)
    pushed(near, bundle, files)
    replace_file(tiny.root / "srt/a.py", b"VALUE = 1\n")
    found = deploy.status(near)
    assert (found.state, {f.path: f.state for f in found.files}["srt/a.py"]) == ("partial", "base")
    pushed(near, bundle, files)
    assert deploy.status(near).state == "applied"
    deploy.rollback(near, purge=True)
    assert differences(before, listing(tiny.root)) == []


def upgrade(tiny, version="0.5.12"):
    shutil.rmtree(tiny.site / "sglang-0.5.11.dist-info")
    for path in ("srt/a.py", "srt/b.py", "__init__.py", "srt/__init__.py"):
        (tiny.root / path).unlink()
    newer = {"__init__.py": b"", "srt/__init__.py": b"", "srt/a.py": b"VALUE = 100\n", "srt/b.py": b"VALUE = 200\n"}
    tiny_package(tiny.site, version, newer)


def test_status_upgraded_and_the_way_out(tiny, near):
    """After an upgrade the new version's files are not touched; only what is still ours goes."""
    pushed(near, *bundle_for(tiny.root, RESULTS))
    upgrade(tiny)
    found = deploy.status(near)
    assert (found.state, found.version) == ("upgraded", "0.5.12")
    assert "0.5.11 was replaced by 0.5.12" in found.reason
    plan = deploy.plan_rollback(near, purge=True)
    assert any("not ours any more: srt/a.py" in w for w in plan.warnings)
    deploy.rollback(near, plan=plan)
    assert (tiny.root / "srt/a.py").read_bytes() == b"VALUE = 100\n"
    assert not (tiny.root / "srt/new").exists()
    assert not tiny.state.exists()


def test_push_after_an_upgrade_starts_a_new_chain(tiny, near):
    """The base of the new version is what a rollback goes back to, never the one of the old version."""
    pushed(near, *bundle_for(tiny.root, RESULTS))
    upgrade(tiny)
    bundle, files = bundle_for(tiny.root, {"srt/a.py": b"VALUE = 500\n"}, "0.5.12")
    pushed(near, bundle, files)
    assert not (tiny.root / "srt/new/c.py").exists()
    assert deploy.status(near).state == "applied"
    assert deploy.rollback(near).to == "base"
    assert (tiny.root / "srt/a.py").read_bytes() == b"VALUE = 100\n"


def test_status_orphaned_after_an_uninstall(tiny, near):
    """Pip leaves our new files, and with them a folder that imports as an empty package (pip#11835, #13964)."""
    pushed(near, *bundle_for(tiny.root, RESULTS))
    shutil.rmtree(tiny.site / "sglang-0.5.11.dist-info")
    for path in ("srt/a.py", "srt/b.py", "__init__.py", "srt/__init__.py"):
        (tiny.root / path).unlink()
    found = deploy.status(near)
    assert (found.state, found.reason) == ("orphaned", "SGLang was uninstalled; 1 file of d-0001 is left over")
    with pytest.raises(OverlayError, match="uninstalled under the overlay"):
        deploy.plan_push(near, *bundle_for(tiny.root, RESULTS))
    assert deploy.rollback(near, purge=True).removed == 1
    assert not tiny.root.exists()
    assert not tiny.state.exists()


def test_new_files_are_listed_as_added(sglang, here):
    """The plan tells new files from changed ones, with mode and owner where there is a file."""
    plan = deploy.plan_push(here, *overlay_for(sglang.root))
    kinds = {a.path: (a.action, a.mode) for a in plan.actions}
    assert kinds == {**dict.fromkeys(EDITED, ("change", 0o644)), **dict.fromkeys(ADDED, ("add", None))}
