# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.crashes import steps_of
from tests.support.installs import Install, install, new_venv, tiny_package
from tests.support.packages import Pip, build_wheel
from tests.support.servers import Server
from tests.support.sshd import SshServer
from tests.support.sshd_binary import SshdUnavailable
from tests.support.stages import PACKAGE, SCENARIOS, Recorder, Stage, copy, times
from tests.support.trees import differences, listing
from tests.support.upgrades import FILES, OLD, Case
from tests.support.waiting import HANG
from tests.support.wheels import CACHE

from ddtree_overlay.config import Host
from ddtree_overlay.hosts.transport import AgentTransport, open_transport
from ddtree_overlay.wheels import fetch_release


RELEASE = "0.5.11"


@pytest.fixture(autouse=True)
def bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents and interpreters write bytecode as on any host; with this variable set, those tests would test nothing."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)


@pytest.fixture(scope="session")
def wheel_site() -> Iterator[Path]:
    """The published wheel, unpacked; every install hard-links to it. No test may change a byte of it (uv#10579)."""
    site = fetch_release(RELEASE, CACHE)
    before = listing(site / "sglang/srt")
    yield site
    assert differences(before, listing(site / "sglang/srt")) == []


@pytest.fixture
def sglang(tmp_path: Path, wheel_site: Path) -> Install:
    """A virtual environment with SGLang 0.5.11."""
    return install(tmp_path / "venv", wheel_site)


@pytest.fixture
def tiny(tmp_path: Path) -> Install:
    """A virtual environment with a package that only has the outline of SGLang; quick to import."""
    python, site = new_venv(tmp_path / "tiny")
    tiny_package(site, RELEASE)
    return Install(python, site)


@pytest.fixture
def here(sglang: Install) -> Iterator[AgentTransport]:
    """The local transport to `sglang`."""
    with open_transport(sglang.host()) as transport:
        yield transport


@pytest.fixture
def near(tiny: Install) -> Iterator[AgentTransport]:
    """The local transport to `tiny`."""
    with open_transport(tiny.host()) as transport:
        yield transport


@pytest.fixture(scope="session")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    """A private sshd; where none can be had the tests are skipped with the reason, and in CI they fail."""
    try:
        server = SshServer.start(tmp_path_factory.mktemp("sshd"), CACHE)
    except SshdUnavailable as e:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no sshd: {e}")
    with server:
        yield server


@pytest.fixture
def namespaces() -> None:
    """Private mount namespaces, which need root; skipped with the reason, and in CI an error."""
    if os.geteuid() == 0 and shutil.which("unshare"):
        done = subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False)
        if done.returncode == 0:
            return
    if os.environ.get("CI"):
        pytest.fail("private mount namespaces are not available")
    pytest.skip("private mount namespaces need root and unshare")


@pytest.fixture
def server(tiny: Install, tmp_path: Path) -> Iterator[Server]:
    """A running server of the tiny package, without an overlay."""
    server = Server.create(tiny, tmp_path / "server")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def host(sshd: SshServer, server: Server) -> Host:
    """The server's host, over SSH, with a restart command that works."""
    python = str(server.install.python)
    return sshd.host("gpu", python, restart=server.restart, restart_timeout=HANG, health=server.health())


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


@pytest.fixture(params=SCENARIOS)
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    """A scenario, on a file system in memory where there is one: thousands of fsyncs cost nothing there."""
    scenario = SCENARIOS[request.param]
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        site = Path(folder, "site")
        tiny_package(site, "0.5.11", PACKAGE)
        (site / "sglang/srt/a.py").chmod(0o640)
        copy(site, Path(folder, "pristine"))
        scenario.prepare(site)
        copy(site, Path(folder, "before"))
        before = listing(site)
        recorder = Recorder(site)
        with recorder:
            scenario.operate(site)
        after = listing(site)
        pristine = listing(Path(folder, "pristine"))
        made = Stage(Path(folder), before, after, pristine, recorder.call, [], times(Path(folder, "before")))
        made.reset()
        yield dataclasses.replace(made, trace=steps_of(made.work()))
