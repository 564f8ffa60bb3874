# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.installs import Install, install, new_venv, tiny_package
from tests.support.sshd import SshdUnavailable, SshServer
from tests.support.trees import differences, listing

from ddtree_overlay.hosts.transport import AgentTransport, open_transport
from ddtree_overlay.wheels import fetch_release


CACHE = Path(__file__).parents[2] / ".cache"
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
