# SPDX-License-Identifier: Apache-2.0
"""Somebody installs SGLang under the overlay: real pip and uv, a real sshd, and what every verb makes of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.agents import sabotaged
from tests.support.installs import Install, bundle_for, new_venv
from tests.support.packages import Pip, Uv, build_wheel
from tests.support.servers import Server
from tests.support.trees import differences, listing

from ddtree_overlay import deploy, doctor, export, proving
from ddtree_overlay.errors import ConflictError, OverlayError, RolledBackError
from ddtree_overlay.hosts.transport import AgentTransport, open_transport
from ddtree_overlay.manifest import Bundle
from ddtree_overlay.remote import pushing, reading, reporting
from ddtree_overlay.remote.common import Refusal
from ddtree_overlay.reports import plain, status_lines
from ddtree_overlay.snapshots import snapshot_host


if TYPE_CHECKING:
    from tests.support.sshd import SshServer

ASKED = {"operator": "ann@desk", "lock_wait": 0, "note": ""}
OLD, NEW, UNKNOWN = "0.5.11", "0.5.12", "0.9.0"
COMMON = {"__init__.py": b"", "srt/__init__.py": b"", "srt/speculative/dflash_worker.py": b"DFLASH = 1\n"}
#: What each version consists of; one module is gone in the newer one, and another one is new.
FILES = {
    OLD: {**COMMON, "srt/a.py": b"VALUE = 1\n", "srt/b.py": b"VALUE = 2\n", "srt/gone.py": b"GONE = 1\n"},
    NEW: {**COMMON, "srt/a.py": b"VALUE = 100\n", "srt/b.py": b"VALUE = 200\n", "srt/fresh.py": b"FRESH = 1\n"},
    UNKNOWN: {**COMMON, "srt/a.py": b"VALUE = 1000\n", "srt/b.py": b"VALUE = 2000\n"},
}
TREE, NAMES, FIRST = (f"srt/speculative/ddtree/{name}.py" for name in ("tree", "names", "first"))
#: The overlay for each: one module is the same for both, one differs, and the older one has one more.
RESULTS = {
    OLD: {
        "srt/a.py": b"VALUE = 5\n",
        "srt/gone.py": b"GONE = 5\n",
        TREE: b"T = 1\n",
        NAMES: b"N = 11\n",
        FIRST: b"F\n",
    },
    NEW: {"srt/a.py": b"VALUE = 500\n", TREE: b"T = 1\n", NAMES: b"N = 12\n"},
}


class Case:
    """An SGLang that was installed by pip, behind an sshd."""

    def __init__(self, install: Install, sshd: SshServer, wheels: dict[str, Path], folder: Path) -> None:
        self.install = install
        self.pip = Pip(install.python)
        self.uv = Uv(folder.parent / "uv-cache")
        self.wheels = wheels
        self.folder = folder
        self.host = sshd.host("gpu", str(install.python))
        self.transport: AgentTransport = open_transport(self.host)

    def upgrade(self, version: str = NEW, *options: str) -> None:
        """Install the release over what is there; by uv, which takes a tenth of the time that pip does."""
        self.uv("pip", "install", "--python", self.install.python, "--no-deps", *options, self.wheels[version])

    def bundle(self, version: str) -> tuple[Bundle, dict[str, bytes]]:
        """The overlay for the release, built from its wheel."""
        folder = self.folder / f"unpacked-{version}"
        if not folder.exists():
            with zipfile.ZipFile(self.wheels[version]) as archive:
                archive.extractall(folder)
        return bundle_for(folder / "sglang", RESULTS[version], version)

    def plan(self, version: str) -> deploy.PushPlan:
        """What a push of the overlay for the release would do."""
        return deploy.plan_push(self.transport, self.bundle(version)[0], self.bundle(version)[1])

    def push(self, version: str) -> deploy.Deployment:
        """Push the overlay for the release."""
        plan = self.plan(version)
        return deploy.push(self.transport, plan, self.bundle(version)[1], operator="ann@desk")

    def status(self) -> deploy.Status:
        """What is on the host."""
        return deploy.status(self.transport)

    def tree(self) -> dict[str, str]:
        """The package without compiled files."""
        found = listing(self.install.root)
        return {path: what for path, what in found.items() if "__pycache__" not in path}

    def is_pristine(self, version: str) -> bool:
        """Whether the package holds the files of the release, and nothing else but compiled files."""
        found = {p.relative_to(self.install.root).as_posix(): p for p in self.install.root.rglob("*") if p.is_file()}
        return {n: p.read_bytes() for n, p in found.items() if "__pycache__" not in n} == FILES[version]


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small wheel of each version."""
    folder = tmp_path_factory.mktemp("wheels")
    return {version: build_wheel(folder, version, files) for version, files in FILES.items()}


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory, wheels: dict[str, Path]) -> Path:
    """The site-packages that pip made, to copy from."""
    python, site = new_venv(tmp_path_factory.mktemp("installed") / "venv")
    Pip(python)("install", "--no-deps", wheels[OLD])
    return site


@pytest.fixture
def case(tmp_path: Path, sshd: SshServer, wheels: dict[str, Path], installed: Path) -> Iterator[Case]:
    """SGLang 0.5.11 with its overlay pushed."""
    python, site = new_venv(tmp_path / "venv")
    shutil.copytree(installed, site, dirs_exist_ok=True)
    made = Case(Install(python, site), sshd, wheels, tmp_path)
    with made.transport:
        made.push(OLD)
        # The server has compiled what it has imported: pip does not know of that either.
        made.install.run("import sglang.srt.a, sglang.srt.speculative.ddtree.tree")
        yield made


def refused(what: str, call: Any, *args: Any, **more: Any) -> OverlayError:
    """The error that `call` ends with."""
    with pytest.raises(OverlayError, match=what) as caught:
        call(*args, **more)
    return caught.value


def test_an_upgrade_by_pip_and_a_push_for_the_new_release(case: Case):
    """Status says what happened; the old bundle is refused; the new one starts anew, and goes back to the new one."""
    case.pip("install", "--no-deps", "-U", case.wheels[NEW])
    found = case.status()
    assert (found.state, found.version, found.overlay_id) == ("upgraded", NEW, None)
    assert found.reason == "SGLang 0.5.11 was replaced by 0.5.12 under d-0001; 3 files of d-0001 are left over"
    assert found.leftovers == (FIRST, NAMES, TREE)
    shown = "\n".join(map(plain, status_lines(found)))
    assert all(f"! {path}" in shown for path in found.leftovers)
    assert "srt/a.py" not in shown
    assert "next: ddtree-overlay snapshot --host gpu && ddtree-overlay patch --host gpu && ddtree-overlay push" in shown

    before = case.tree()
    error = refused("SGLang 0.5.11 was replaced by 0.5.12 under d-0001", case.plan(OLD).check)
    assert isinstance(error, ConflictError)
    assert error.next_step.startswith("ddtree-overlay snapshot --host gpu")
    for to in (None, "base"):
        error = refused("no base to go back to", deploy.rollback, case.transport, to=to, operator="ann")
        assert "rollback --host gpu --purge" in error.next_step
    refused("d-0001 is not in place any more", case.transport.call, "confirm", ASKED)
    checks = doctor.diagnose(case.transport).checks
    assert [(c.name, c.level) for c in checks if "replaced by 0.5.12" in c.message] == [("overlay", "warning")]
    assert differences(before, case.tree()) == []

    done = case.push(NEW)
    assert (done.id, done.version) == ("d-0002", NEW)
    assert done.note == "found before it: SGLang 0.5.11 was replaced by 0.5.12 under d-0001"
    assert case.status().state == "applied"
    assert not (case.install.root / FIRST).exists()
    assert (case.install.root / NAMES).read_bytes() == b"N = 12\n"
    history = deploy.history(case.transport)
    assert [(d.id, d.version, d.current) for d in history] == [("d-0001", OLD, False), ("d-0002", NEW, True)]

    refused("d-0001 is not below the live deployment", deploy.plan_rollback, case.transport, to="d-0001")
    assert deploy.rollback(case.transport).to == "base"
    assert case.is_pristine(NEW)
    # Its compiled files, of the older overlay as well, went with it.
    assert not (case.install.root / TREE).parent.exists()


def test_the_overlay_for_the_new_release_is_found_among_several(case: Case):
    """Older modules lie where the new ones will, and the bundle for the new base is not the first that is offered."""
    case.upgrade()
    offered = [[{**row, "size": 1} for row in case.bundle(version)[0].rows()] for version in (OLD, NEW)]
    plan = case.transport.call("plan_push", {"candidates": offered, "releases": [OLD, NEW]}).result
    assert (plan["chosen"], plan["blockers"]) == (1, [])


def test_up_and_down_again(case: Case):
    """Back on the older release, it is the one that a rollback goes back to; nothing of either overlay is left."""
    case.upgrade()
    case.push(NEW)
    case.upgrade(OLD)
    assert case.status().reason.startswith("SGLang 0.5.12 was replaced by 0.5.11 under d-0002; 2 files")
    refused("was replaced by 0.5.11", case.plan(NEW).check)
    assert case.push(OLD).id == "d-0003"
    assert deploy.rollback(case.transport).to == "base"
    assert case.is_pristine(OLD)


def test_an_export_after_an_upgrade(case: Case, tmp_path: Path):
    """apply.py of the old release refuses, and asks for another export; that of the new one does as a push does."""

    def apply(version: str, *words: str) -> tuple[int, dict[str, Any]]:
        folder = tmp_path / f"export-{version}"
        for path, data in export.export_files(*case.bundle(version)).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
        command = [case.install.python, folder / "apply.py", *words]
        done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=60, check=False)
        return done.returncode, json.loads(done.stdout)

    case.upgrade()
    code, answer = apply(OLD, "push")
    assert (code, "was replaced by 0.5.12" in answer["what"]) == (4, True)
    assert "then export it for the SGLang here" in answer["next"]
    code, answer = apply(OLD, "rollback")
    assert (code, "no base to go back to" in answer["what"]) == (4, True)
    code, answer = apply(NEW, "push")
    assert (code, answer["deployment"]["id"]) == (0, "d-0002")
    assert apply(NEW, "rollback")[0] == 0
    assert case.is_pristine(NEW)


def test_a_snapshot_after_an_upgrade_leaves_out_what_was_left_behind(case: Case):
    """What pip left behind is no part of the new base: no rollback is needed in between."""
    case.upgrade()
    wanted = {*FILES[NEW], *RESULTS[OLD]}
    manifest, files = snapshot_host(case.transport, "gpu", wanted)
    assert files == FILES[NEW]
    assert manifest.release == NEW
    assert any("left over from an earlier deployment" in w and FIRST in w for w in case.transport.warnings)


def test_purge_after_an_upgrade_takes_away_what_was_left_behind(case: Case):
    """The way out without a push: the new release as pip installed it, and no state folder."""
    case.upgrade()
    assert deploy.rollback(case.transport, purge=True).removed == 3
    assert case.is_pristine(NEW)
    assert not case.install.state.exists()


def test_a_reinstall_of_the_same_release(case: Case):
    """Told from an edit by hand; a push mends it, and one step back is the base, not the same overlay again."""
    case.upgrade(OLD, "--reinstall")
    found = case.status()
    assert (found.state, found.leftovers) == ("partial", (FIRST, NAMES, TREE))
    assert found.reason == "SGLang 0.5.11 was installed again under d-0001; 3 files of d-0001 are left over"
    refused("d-0001 is not in place any more", case.transport.call, "confirm", ASKED)
    assert case.push(OLD).id == "d-0002"
    assert case.status().state == "applied"
    back = deploy.rollback(case.transport)
    assert (back.undone, back.to) == (("d-0002",), "base")
    assert case.is_pristine(OLD)


def test_another_build_of_the_same_release(case: Case, wheels: dict[str, Path], tmp_path: Path):
    """The version is the same and the files are not: the base is another one all the same."""
    other = {**FILES[OLD], "srt/a.py": b"VALUE = 11\n", "srt/gone.py": b"GONE = 11\n"}
    case.wheels = {**case.wheels, OLD: build_wheel(tmp_path / "other", OLD, other)}
    case.upgrade(OLD, "--reinstall")
    found = case.status()
    assert (found.state, "another build of 0.5.11 under d-0001" in found.reason) == ("upgraded", True)
    case.wheels = wheels
    refused("no overlay that was offered is for what is installed now", case.plan(OLD).check)
    bundle, files = bundle_for(case.install.root, {"srt/a.py": b"VALUE = 55\n"})
    deploy.push(case.transport, deploy.plan_push(case.transport, bundle, files), files, operator="ann")
    deploy.rollback(case.transport)
    assert (case.install.root / "srt/a.py").read_bytes() == b"VALUE = 11\n"


def test_a_reinstall_over_a_push_that_was_cut_off(case: Case, monkeypatch: pytest.MonkeyPatch):
    """What was installed again is no edit by hand: it stays, and what is left of the push goes."""
    bundle, files = bundle_for(case.folder / f"unpacked-{OLD}/sglang", {"srt/a.py": b"VALUE = 6\n", "srt/z.py": b""})
    with sabotaged(monkeypatch, "swap", "put", 2), pytest.raises(OverlayError):
        deploy.push(case.transport, deploy.plan_push(case.transport, bundle, files), files, operator="ann")
    case.upgrade(OLD, "--reinstall")
    assert case.push(OLD).current
    assert case.status().state == "applied"
    assert not (case.install.root / "srt/z.py").exists()
    deploy.rollback(case.transport)
    assert case.is_pristine(OLD)


def test_an_uninstall(case: Case):
    """Only a purge is left: pip has removed what a rollback would go back to (pip#11835, #13964)."""
    case.pip("uninstall", "-y", "sglang")
    found = case.status()
    assert (found.state, found.leftovers) == ("orphaned", (FIRST, NAMES, TREE))
    assert "--purge" in found.next_step
    refused("uninstalled under the overlay", case.plan, OLD)
    refused("no base to go back to", deploy.rollback, case.transport)
    assert [d.id for d in deploy.history(case.transport)] == ["d-0001"]
    assert deploy.rollback(case.transport, purge=True).removed == 3
    assert not case.install.root.exists()
    assert not case.install.state.exists()


def test_a_reinstall_by_pip(case: Case):
    """As by uv; the compiled files that pip has made do not stand in the way."""
    case.pip("install", "--no-deps", "--force-reinstall", case.wheels[OLD])
    assert case.status().reason.startswith("SGLang 0.5.11 was installed again under d-0001")
    case.push(OLD)
    assert case.install.run("import sglang.srt.a as a; print(a.VALUE)") == "5"
    deploy.rollback(case.transport)
    assert case.install.run("import sglang.srt.a as a; print(a.VALUE)") == "1"
    assert case.is_pristine(OLD)


def test_the_cache_of_uv_is_not_touched(case: Case):
    """What an upgrade has linked to the cache is replaced there by a push, never written through (uv#10579)."""
    case.upgrade()
    cache = listing(case.uv.cache)
    assert (case.install.root / "srt/a.py").stat().st_nlink > 1
    case.push(NEW)
    deploy.rollback(case.transport)
    assert case.is_pristine(NEW)
    assert differences(cache, listing(case.uv.cache)) == []


def test_an_upgrade_to_a_release_that_is_not_supported(case: Case):
    """No snapshot is advised, for nothing can be built from it."""
    case.upgrade(UNKNOWN)
    found = case.status()
    assert (found.state, found.version) == ("upgraded", UNKNOWN)
    assert found.next_step.startswith("ddtree-overlay rollback --host gpu --purge")
    assert "snapshot" not in found.next_step
    error = refused("was replaced by 0.9.0", case.plan(OLD).check)
    assert "pip install sglang==" in error.next_step
    assert any(
        c.level == "warning" and "not one of the supported" in c.message for c in doctor.diagnose(case.transport).checks
    )


def test_an_upgrade_that_fails_leaves_the_overlay_in_place(case: Case, tmp_path: Path):
    """Pip puts the old files back, patched as they were; what it forgot to take away is no concern of ours."""
    wheel = tmp_path / case.wheels[NEW].name
    data = case.wheels[NEW].read_bytes()
    wheel.write_bytes(data.replace(b"FRESH = 1\n", b"FRESH = 2\n", 1))
    assert "srt/fresh.py" in case.pip.fails("install", "--no-deps", wheel)
    assert case.status().state == "applied"
    assert case.plan(OLD).is_noop
    deploy.rollback(case.transport)
    assert {p: (case.install.root / p).read_bytes() for p in FILES[OLD]} == FILES[OLD]


def test_half_of_an_installation_is_never_patched(case: Case, tmp_path: Path):
    """At every file that pip touches: a push, old or new, is refused unless the whole release is there."""
    copies = case.pip.watched(tmp_path / "copies", tmp_path / "hooks", "install", "--no-deps", case.wheels[NEW])
    states = []
    offered = {v: case.bundle(v)[0] for v in (OLD, NEW)}
    for copy in copies:
        args = {"root": str(copy)}
        state = reporting.status(args, b"")[0]["state"]
        states.append(state)
        for version, bundle in offered.items():
            rows = [{**row, "size": 1} for row in bundle.rows()]
            try:
                plan = pushing.plan_push({**args, "candidates": [rows], "releases": [version]}, b"")[0]
            except Refusal:
                continue
            whole = all((copy / "sglang" / p).is_file() for p in FILES[version])
            todo = [a for a in plan["actions"] if a["action"] != "same"]
            conflicts = [a for a in todo if a["action"] == "conflict"]
            assert not todo or conflicts or plan["blockers"] or whole, (copy, version, state)
            if state == "half-installed":
                assert "not whole" in plan["blockers"][0]["what"]
        if state == "half-installed":
            with pytest.raises(Refusal, match="not whole"):
                reading.snapshot({**args, "wanted": [], "mention": "DFLASH"}, b"")
    assert len(copies) > 15
    assert states[0] == "applied"
    assert states[-1] == "upgraded"
    assert {"orphaned", "half-installed"} <= set(states)


def test_pip_is_killed_in_the_middle(case: Case, tmp_path: Path):
    """Every verb says so, nothing is written, and the advised command makes it whole again."""
    case.pip.killed(11, tmp_path / "hooks", "install", "--no-deps", case.wheels[NEW])
    before = listing(case.install.site)
    found = case.status()
    assert found.state == "half-installed"
    assert "its metadata is gone" in found.reason
    assert "pip has left the old files in ~glang-0.5.11.dist-info" in found.reason
    assert "-m pip uninstall -y sglang; " in found.next_step
    for version in (OLD, NEW):
        error = refused("SGLang is not whole on this host", case.plan(version).check)
        assert isinstance(error, ConflictError)
        assert error.next_step == found.next_step
    refused("SGLang is not whole", snapshot_host, case.transport, "gpu", [])
    refused("SGLang is not whole", deploy.rollback, case.transport)
    checks = doctor.diagnose(case.transport).checks
    assert any(c.level == "error" and "not whole" in c.message for c in checks)
    assert differences(before, listing(case.install.site)) == []

    case.pip("uninstall", "-y", "sglang")
    case.pip("install", "--no-deps", "--ignore-installed", case.wheels[NEW])
    assert case.status().state == "upgraded"
    case.push(NEW)
    assert case.status().state == "applied"


def test_a_push_that_was_planned_before_is_refused_by_the_agent(case: Case):
    """A plan is one thing; the agent looks at the whole installation again under its lock."""
    case.upgrade()
    plan, files = case.plan(NEW), case.bundle(NEW)[1]
    (case.install.root / "srt/fresh.py").unlink()
    error = refused(
        "1 of 5 modules that its metadata lists are missing: srt/fresh",
        deploy.push,
        case.transport,
        plan,
        files,
        operator="ann",
    )
    assert isinstance(error, ConflictError)
    assert (case.install.root / "srt/a.py").read_bytes() == b"VALUE = 100\n"


def test_linked_folders_are_looked_into_once(case: Case):
    """Modules behind a link count; a link to a folder above itself has an end."""
    (case.install.root / "srt/loop").symlink_to("..")
    away = case.install.site / "elsewhere"
    (case.install.root / "srt/speculative").rename(away)
    (case.install.root / "srt/speculative").symlink_to(away)
    assert case.status().state == "applied"


def test_an_installation_that_was_never_finished(case: Case):
    """Every file is there, and RECORD, which comes last, is not; another distribution of a like name has its own."""
    case.upgrade()
    (case.install.site / "sglang-router-0.1.0.dist-info").mkdir()
    assert case.status().state == "upgraded"
    (case.install.site / f"sglang-{NEW}.dist-info/RECORD").unlink()
    found = case.status()
    assert (found.state, "has no RECORD" in found.reason) == ("half-installed", True)
    refused("its installation was never finished", case.plan(NEW).check)


def test_two_records_of_one_package(case: Case):
    """`--ignore-installed` leaves both: which files are whose cannot be known."""
    case.pip("install", "--no-deps", "--ignore-installed", case.wheels[NEW])
    assert "two versions are recorded as installed" in case.status().reason
    refused("0.5.11 and 0.5.12", case.plan(NEW).check)


def test_files_that_were_copied_over_half(case: Case):
    """Those that the overlay touches are of the new release, others are as well, and the metadata is the old one's."""
    deploy.rollback(case.transport, purge=True)
    for path in ("srt/a.py", "srt/b.py"):
        (case.install.root / path).unlink()
        (case.install.root / path).write_bytes(FILES[NEW][path])
    error = refused("its metadata says 0.5.11", case.plan(NEW).check)
    assert "srt/b.py" in error.what


def test_a_file_of_the_old_release_never_comes_back(case: Case):
    """A patched file that the new release has not, and that was not removed either, goes with the old deployment."""
    kept = (case.install.root / "srt/gone.py").read_bytes()
    case.upgrade()
    (case.install.root / "srt/gone.py").write_bytes(kept)
    case.push(NEW)
    assert not (case.install.root / "srt/gone.py").exists()
    deploy.rollback(case.transport)
    assert case.is_pristine(NEW)


def test_a_server_that_was_started_before_an_upgrade_has_older_code(case: Case):
    """It does not matter who replaced the files: pip, or a push."""
    code = "import sglang.srt.a, time; print('up', flush=True); time.sleep(60)"
    time.sleep(0.2)
    server = subprocess.Popen([case.install.python, "-c", code], stdout=subprocess.PIPE, cwd="/")
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == b"up\n"
        assert [(p.pid, p.stale) for p in case.status().processes] == [(server.pid, False)]
        case.upgrade()
        assert [(p.pid, p.stale) for p in case.status().processes] == [(server.pid, True)]
        case.push(NEW)
        assert [(p.pid, p.stale) for p in case.status().processes] == [(server.pid, True)]
    finally:
        server.kill()
        server.wait()


def test_a_restart_that_restarts_nothing_after_an_upgrade(case: Case, sshd: SshServer, tmp_path: Path):
    """The live server still reports the overlay of the release that is gone: the new files go back to the new base."""
    deploy.rollback(case.transport, purge=True)
    server = Server.create(case.install, tmp_path / "server")
    bundle, files = server.overlay()
    deploy.push(case.transport, deploy.plan_push(case.transport, bundle, files), files, operator="ann")
    info = server.start()
    try:
        assert info["speculative_ddtree_overlay_id"] == bundle.overlay_id
        case.upgrade()
        shutil.rmtree(server.folder / "pristine")
        shutil.copytree(case.install.root, server.folder / "pristine")
        shutil.rmtree(server.folder / "pristine/srt/speculative/ddtree")
        newer, files = server.overlay("well", "newer")
        host = sshd.host("gpu", str(case.install.python), restart=("true",), health=server.health(2.0))
        with open_transport(host) as transport:
            plan = deploy.plan_push(transport, newer, files)
            with pytest.raises(RolledBackError, match="still running the old code") as caught:
                proving.push(transport, plan, files, operator="ann", progress=lambda _: None)
        assert bundle.overlay_id in caught.value.what
        assert case.is_pristine(NEW)
    finally:
        server.stop()
