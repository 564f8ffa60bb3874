# SPDX-License-Identifier: Apache-2.0
"""Push on the straight path, on a real SGLang 0.5.11: exactly the plan, exact attributes, nothing through a link."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.support.installs import ADDED, EDITED, bundle_for, overlay_for
from tests.support.trees import differences, listing

from ddtree_overlay import deploy
from ddtree_overlay.errors import ConflictError, LockedError, OverlayError
from ddtree_overlay.hosts.transport import open_transport


def deployed(transport, bundle, files, operator="tester@desk"):
    return deploy.push(transport, deploy.plan_push(transport, bundle, files), files, operator=operator)


def test_push_does_what_its_plan_says(sglang, here):
    """The plan names each file's action; afterwards each file has the digest that the plan promised."""
    bundle, files = overlay_for(sglang.root)
    plan = deploy.plan_push(here, bundle, files)
    assert plan.counts() == {"add": 2, "change": 2, "remove": 0, "same": 0, "conflict": 0}
    assert (plan.version, plan.install, plan.deployment, plan.is_noop) == ("0.5.11", "wheel", None, False)
    done = deploy.push(here, plan, files, operator="tester@desk")
    assert (done.id, done.state, done.current, done.operator) == ("d-0001", "pending", True, "tester@desk")
    assert done.overlay_id == bundle.overlay_id
    assert {p: (sglang.root / p).read_bytes() for p in files} == files
    assert deploy.status(here).state == "applied"


def test_plan_writes_nothing(sglang, here):
    """Planning leaves the whole site-packages folder as it was, the state folder included (pyinfra#387)."""
    before = listing(sglang.site)
    deploy.plan_push(here, *overlay_for(sglang.root))
    assert differences(before, listing(sglang.site)) == []


def test_second_push_is_up_to_date_and_touches_nothing(sglang, here):
    """The same push again plans nothing; inode, mtime and the history stay as they are."""
    bundle, files = overlay_for(sglang.root)
    deployed(here, bundle, files)
    before = {p: (os.stat(sglang.root / p).st_ino, os.stat(sglang.root / p).st_mtime_ns) for p in files}
    tree = listing(sglang.site)
    plan = deploy.plan_push(here, bundle, files)
    assert plan.is_noop
    assert deploy.push(here, plan, files, operator="x").id == "d-0001"
    assert {p: (os.stat(sglang.root / p).st_ino, os.stat(sglang.root / p).st_mtime_ns) for p in files} == before
    assert differences(tree, listing(sglang.site)) == []


def test_hard_links_are_never_written_through(sglang, here, wheel_site):
    """The other name of a replaced file, as in uv's cache, keeps inode and bytes (uv#10579, conda#9858, pnpm#11782)."""
    path = EDITED[0]
    cached = (wheel_site / "sglang" / path).read_bytes()
    inode = os.stat(sglang.root / path).st_ino
    assert inode == os.stat(wheel_site / "sglang" / path).st_ino
    bundle, files = overlay_for(sglang.root)
    plan = deploy.plan_push(here, bundle, files)
    assert any("hard link" in w for w in plan.warnings)
    deploy.push(here, plan, files, operator="x")
    assert os.stat(sglang.root / path).st_ino != inode
    assert (wheel_site / "sglang" / path).read_bytes() == cached


def test_mode_owner_and_xattrs_are_kept_and_mtime_is_new(tiny, near):
    """Attributes go to the temporary file before the rename (ansible#83805, pyinfra#19, ansible#2810)."""
    target = tiny.root / "srt/a.py"
    os.chmod(target, 0o640)
    if os.geteuid() == 0:
        os.chown(target, 1234, 2345)
    xattr = True
    try:
        os.setxattr(target, "user.test", b"label")
    except OSError:
        xattr = False
    os.utime(target, (1_577_836_800, 1_577_836_800))
    before = target.stat()
    deployed(near, *bundle_for(tiny.root, {"srt/a.py": b"VALUE = 7\n"}))
    after = target.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert after.st_mtime > before.st_mtime + 1000
    assert not xattr or os.getxattr(target, "user.test") == b"label"


def test_new_files_follow_their_neighbours(tiny, near):
    """A new file and its folder belong to the owner of the folder they come into, and are no more open than it is."""
    os.chmod(tiny.root / "srt", 0o750)
    if os.geteuid() == 0:
        os.chown(tiny.root / "srt", 1234, 2345)
    deployed(near, *bundle_for(tiny.root, {"srt/new/c.py": b"C = 1\n"}))
    folder, file = (tiny.root / "srt/new").stat(), (tiny.root / "srt/new/c.py").stat()
    parent = (tiny.root / "srt").stat()
    assert (folder.st_uid, file.st_uid, file.st_gid) == (parent.st_uid, parent.st_uid, parent.st_gid)
    assert (folder.st_mode & 0o777, file.st_mode & 0o777) == (0o750, 0o640)


def test_same_second_same_length_edit_is_seen_by_the_next_import(tiny, near):
    """Python trusts size and whole second of a compiled file (cpython#121376, #75953): it must be gone after a push."""
    read = "import sglang.srt.a as a; print(a.VALUE)"
    for value in range(1, 6):
        # Start in a fresh second and do both within it; the file's second and length stay equal.
        time.sleep(1.02 - time.time() % 1)
        (tiny.root / "srt/a.py").write_bytes(b"VALUE = %d\n" % value)
        assert tiny.run(read) == str(value)
        assert list((tiny.root / "srt/__pycache__").glob("a.*.pyc"))
        deployed(near, *bundle_for(tiny.root, {"srt/a.py": b"VALUE = 9\n"}))
        assert tiny.run(read) == "9"
        deploy.rollback(near, purge=True)
        assert tiny.run(read) == str(value)
        if value == 2:
            break


def test_unchecked_bytecode_is_removed_and_comes_back(tiny, near):
    """Bytecode marked unchecked hides the source for ever (PEP 552); it goes with a push, returns with a rollback."""
    source = tiny.root / "srt/a.py"
    code = "import py_compile, sys; py_compile.compile(sys.argv[1], "
    code += "invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)"
    subprocess.run([tiny.python, "-c", code, source], check=True)
    before = listing(tiny.root)
    deployed(near, *bundle_for(tiny.root, {"srt/a.py": b"VALUE = 5\n"}))
    assert tiny.run("import sglang.srt.a as a; print(a.VALUE)") == "5"
    deploy.rollback(near, purge=True)
    changed = differences(before, listing(tiny.root))
    assert [line for line in changed if "a.cpython" in line or "a.py" in line] == []


def test_pycache_prefix_of_the_interpreter_is_cleaned_too(tiny, tmp_path, monkeypatch):
    """With PYTHONPYCACHEPREFIX the stale bytecode is elsewhere; the interpreter knows where (velvet#852)."""
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path / "pyc"))
    tiny.run("import sglang.srt.a", PYTHONPYCACHEPREFIX=str(tmp_path / "pyc"))
    assert list((tmp_path / "pyc").rglob("a.*.pyc"))
    with open_transport(tiny.host()) as transport:
        deployed(transport, *bundle_for(tiny.root, {"srt/a.py": b"VALUE = 5\n"}))
    assert not list((tmp_path / "pyc").rglob("a.*.pyc"))


def test_nothing_importable_lies_in_the_package_besides_the_overlay(sglang, here):
    """No backup and no temporary file is left in the package: SGLang's model registry imports whatever it finds."""
    before = listing(sglang.root)
    bundle, files = overlay_for(sglang.root)
    deployed(here, bundle, files)
    added = {line.split()[1] for line in differences(before, listing(sglang.root)) if line.startswith("added")}
    assert added == {*ADDED, "srt/speculative/ddtree"}


@pytest.mark.parametrize("path", [*EDITED, ADDED[0]])
def test_a_file_that_changes_between_plan_and_push_stops_it(sglang, here, path):
    """The host checks every digest again; nothing is written, not even the state folder (pyinfra#421)."""
    bundle, files = overlay_for(sglang.root)
    plan = deploy.plan_push(here, bundle, files)
    target = sglang.root / path
    target.parent.mkdir(exist_ok=True)
    data = target.read_bytes() if target.exists() else b""
    target.unlink(missing_ok=True)
    target.write_bytes(data + b"# edited\n")
    before = listing(sglang.site)
    with pytest.raises(ConflictError, match="plan is stale") as caught:
        deploy.push(here, plan, files, operator="x")
    assert caught.value.exit_code == 4
    assert path in str(caught.value)
    assert differences(before, listing(sglang.site)) == []


def test_a_modified_base_is_a_conflict(sglang, here):
    """One blank more than the base: refused with the file's name, nothing written (OBSong#85, patch-package#35)."""
    bundle, files = overlay_for(sglang.root)
    target = sglang.root / EDITED[1]
    data = target.read_bytes()
    target.unlink()
    target.write_bytes(data + b" ")
    before = listing(sglang.site)
    plan = deploy.plan_push(here, bundle, files)
    assert [a.path for a in plan.conflicts] == [EDITED[1]]
    with pytest.raises(ConflictError, match="neither the base"):
        deploy.push(here, plan, files, operator="x")
    assert differences(before, listing(sglang.site)) == []


def test_a_base_patched_by_hand_is_up_to_date_but_warned_about(tiny, near):
    """Everything is in place without a deployment: nothing to do, and said that there is no way to roll back."""
    bundle, files = bundle_for(tiny.root, {"srt/a.py": b"VALUE = 5\n"})
    (tiny.root / "srt/a.py").write_bytes(files["srt/a.py"])
    plan = deploy.plan_push(near, bundle, files)
    assert plan.is_noop
    assert any("no way to roll back" in w for w in plan.warnings)


def test_a_half_patched_base_without_a_deployment_is_refused(tiny, near):
    """A changed file without a recorded base would make the rollback impossible."""
    bundle, files = bundle_for(tiny.root, {"srt/a.py": b"VALUE = 5\n", "srt/b.py": b"VALUE = 6\n"})
    (tiny.root / "srt/a.py").write_bytes(files["srt/a.py"])
    with pytest.raises(ConflictError, match="no deployment here recorded"):
        deployed(near, bundle, files)


def test_a_file_in_the_way_of_a_new_one_is_a_conflict(tiny, near):
    """A new file never replaces one that somebody else put there."""
    bundle, files = bundle_for(tiny.root, {"srt/new.py": b"N = 1\n"})
    (tiny.root / "srt/new.py").write_bytes(b"mine\n")
    with pytest.raises(ConflictError, match="already there"):
        deployed(near, bundle, files)


def test_code_that_does_not_compile_there_is_refused(tiny, near):
    """All files are compiled with the host's Python before the first one is replaced."""
    before = listing(tiny.site)
    bundle, files = bundle_for(tiny.root, {"srt/a.py": b"VALUE = 1\n\nreturn 3\n", "srt/b.py": b"VALUE = 4\n"})
    with pytest.raises(OverlayError, match=r"srt/a\.py:3: .*return"):
        deployed(near, bundle, files)
    assert differences(before, listing(tiny.site)) == []


def test_a_second_overlay_replaces_the_first_and_keeps_the_base(sglang, here):
    """Files that only the first overlay had go back to their base; a rollback steps back through both."""
    before = listing(sglang.site)
    first, first_files = overlay_for(sglang.root)
    second_files = {EDITED[0]: (sglang.root / EDITED[0]).read_bytes() + b"\nDDTREE = 2\n", ADDED[0]: b"# two\n"}
    second, _ = bundle_for(sglang.root, second_files)
    deployed(here, first, first_files)
    plan = deploy.plan_push(here, second, second_files)
    kinds = {a.path: a.action for a in plan.actions}
    assert kinds == {EDITED[0]: "change", EDITED[1]: "change", ADDED[0]: "change", ADDED[1]: "remove"}
    assert deploy.push(here, plan, second_files, operator="x").id == "d-0002"
    assert deploy.status(here).state == "applied"
    assert not (sglang.root / ADDED[1]).exists()
    assert deploy.rollback(here).to == "d-0001"
    assert {p: (sglang.root / p).read_bytes() for p in first_files} == first_files
    assert deploy.rollback(here).to == "base"
    deploy.rollback(here, purge=True)
    assert differences(before, listing(sglang.site)) == []


def test_the_lock_is_held_by_a_live_process_only(tiny, near):
    """A held lock is named with its holder and ends with it; nothing has to be cleaned up (bike_index#4313)."""
    bundle, files = bundle_for(tiny.root, {"srt/a.py": b"VALUE = 5\n"})
    plan = deploy.plan_push(near, bundle, files)
    tiny.state.mkdir()
    code = (
        "import fcntl, json, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX);"
        "json.dump({'pid': 4711, 'operator': 'ann@desk', 'doing': 'push', 'since': 0}, f); f.flush();"
        "print('held', flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, tiny.state / "lock"], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(LockedError, match="ann@desk") as caught:
            deploy.push(near, plan, files, operator="bob@desk")
        assert caught.value.exit_code == 5
    finally:
        holder.kill()
        holder.wait()
    assert deploy.push(near, plan, files, operator="bob@desk").id == "d-0001"


def test_running_servers_are_named(tiny, near):
    """A process that imported the old code keeps it until it is restarted (cpython#124170, omnigent#4539)."""
    bundle, files = bundle_for(tiny.root, {"srt/a.py": b"VALUE = 5\n"})
    code = "import sglang.srt.a, time; print('up', flush=True); time.sleep(600)"
    server = subprocess.Popen([tiny.python, "-c", code], stdout=subprocess.PIPE, cwd="/")
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == b"up\n"
        plan = deploy.plan_push(near, bundle, files)
        assert [(p.pid, p.stale) for p in plan.processes] == [(server.pid, True)]
        # The kernel counts start times in hundredths of a second from a whole-second boot time.
        time.sleep(1.1)
        deploy.push(near, plan, files, operator="x")
        assert [(p.pid, p.stale) for p in deploy.status(near).processes] == [(server.pid, True)]
        deploy.rollback(near)
        assert [(p.pid, p.stale) for p in deploy.status(near).processes] == [(server.pid, False)]
    finally:
        server.kill()
        server.wait()


def test_whoever_asks_is_no_server(tiny):
    """The command line that pushes names the package folder itself; it is not reported as running old code."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(deploy.__file__).parents[1]), *sys.path])}
    code = (
        "import sys; from ddtree_overlay.config import Host; from ddtree_overlay import deploy;"
        "from ddtree_overlay.hosts.transport import open_transport;"
        f"t = open_transport(Host('near', 'near', transport='local', python={str(tiny.python)!r}));"
        "print([p.pid for p in deploy.status(t).processes])"
    )
    done = subprocess.run([tiny.python, "-c", code, "sglang"], check=False, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"


def test_a_package_folder_can_be_pushed_to_directly(tmp_path: Path, wheel_site):
    """With a root, the folder is taken as it is, and no interpreter has to import it."""
    site = tmp_path / "site"
    shutil.copytree(wheel_site, site, copy_function=os.link)
    before = listing(site)
    from ddtree_overlay.config import Host

    bundle, files = overlay_for(site / "sglang")
    host = Host(name="folder", address="localhost", transport="local", root=str(site / "sglang"))
    with open_transport(host) as transport:
        plan = deploy.plan_push(transport, bundle, files)
        assert (plan.install, plan.version, plan.target) == ("unpacked", "0.5.11", f"--root {site / 'sglang'}")
        deploy.push(transport, plan, files, operator="x")
        deploy.rollback(transport, purge=True)
    assert differences(before, listing(site)) == []
