# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.commands import Ran, clean_environ
from tests.support.fleets import machines, write_workspace
from tests.support.sshd import SshServer
from tests.support.sshd_binary import SshdUnavailable
from tests.support.wheels import CACHE

from ddtree_overlay.wheels import wheel_of


PROJECT = Path(__file__).parents[2]
RELEASE = "0.5.11"


Run = Callable[..., Ran]


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A folder with a configuration that knows `ct200`, where nothing listens."""
    folder = tmp_path / "workspace"
    folder.mkdir()
    (folder / "deploy.toml").write_text('[hosts.ct200]\naddress = "127.0.0.1"\nport = 9\ntimeout = 20\n')
    (tmp_path / "home").mkdir()
    return folder


@pytest.fixture
def run(workspace: Path, tmp_path: Path) -> Run:
    """Run the command line in the workspace, as a process of its own."""

    def call(*words: str, stdin: str = "", **env: str) -> Ran:
        done = subprocess.run(
            [sys.executable, "-m", "ddtree_overlay", *words],
            cwd=workspace,
            env={**clean_environ(tmp_path / "home"), **env},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    return call


@pytest.fixture(scope="session")
def release_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The published wheel, unpacked for this run; it plays the package cache that installs are hardlinked to."""
    folder = tmp_path_factory.mktemp("release")
    with zipfile.ZipFile(wheel_of(RELEASE, CACHE)) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture
def site(tmp_path: Path, release_site: Path) -> Path:
    """A site-packages folder with SGLang, hardlinked to the unpacked wheel as uv links to its cache (uv#10579)."""
    folder = tmp_path / "site-packages"
    shutil.copytree(release_site, folder, copy_function=os.link)
    return folder


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory, release_site: Path) -> Path:
    """A workspace in which a folder `sglang` was snapshotted and patched, to copy from."""
    folder = tmp_path_factory.mktemp("prepared")
    for verb in ("snapshot", "patch"):
        command = [sys.executable, "-m", "ddtree_overlay", verb, "--root", str(release_site / "sglang")]
        subprocess.run(command, cwd=folder, env=clean_environ(folder), check=True, capture_output=True, timeout=240)
    return folder


@pytest.fixture
def patched_root(prepared: Path, workspace: Path, site: Path) -> Path:
    """A package folder whose snapshot was taken and patched in the workspace."""
    root = site / "sglang"
    shutil.copytree(prepared / "build", workspace / "build")
    taken = next((prepared / "snapshots").iterdir())
    name = f"root-sglang-{hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:6]}"
    shutil.copytree(taken, workspace / "snapshots" / name)
    manifest = workspace / "snapshots" / name / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(taken.name.encode(), name.encode()))
    return root


@pytest.fixture
def host_python(tmp_path: Path, release_site: Path) -> Path:
    """The interpreter of a virtual environment that SGLang is installed in, without torch."""
    folder = tmp_path / "host"
    venv.create(folder, with_pip=False, symlinks=True)
    purelib = next((folder / "lib").glob("python*/site-packages"))
    shutil.copytree(release_site, purelib, copy_function=os.link, dirs_exist_ok=True)
    return folder / "bin/python"


@pytest.fixture(scope="session")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    """A private sshd on the loopback device; in CI its absence is a failure, never a silent skip."""
    try:
        with SshServer.start(tmp_path_factory.mktemp("sshd"), CACHE) as server:
            yield server
    except SshdUnavailable as e:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no sshd: {e}")


@pytest.fixture(scope="session")
def servers(tmp_path_factory):
    """Four private sshds; in CI their absence is a failure, never a silent skip."""
    started = []
    try:
        started = [SshServer.start(tmp_path_factory.mktemp("sshd"), CACHE) for _ in range(4)]
        yield started
    except SshdUnavailable as e:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no sshd: {e}")
    finally:
        for server in started:
            server.stop()


@pytest.fixture
def three(tmp_path, servers, workspace):
    """The hosts a and b, and c on this machine, pristine, with one bundle that fits all of them."""
    fleet = machines(tmp_path / "hosts", [*servers[:2], None], dict.fromkeys("abc"))
    write_workspace(workspace, fleet)
    return fleet


@pytest.fixture
def ready(prepared, workspace, release_site):
    """The options of a target that is patched in the workspace and that nobody changes."""
    for name in ("snapshots", "build"):
        shutil.copytree(prepared / name, workspace / name)
    return ("--root", str(release_site / "sglang"))


@pytest.fixture(scope="session")
def one_export(prepared, release_site, tmp_path_factory):
    """An export to copy from, with a Dockerfile."""
    folder = tmp_path_factory.mktemp("export")
    words = ["export", "--root", release_site / "sglang", "--format", "dockerfile", "--out", folder / "export"]
    command = [sys.executable, "-m", "ddtree_overlay", *words]
    subprocess.run(command, cwd=prepared, env=clean_environ(folder), check=True, capture_output=True, timeout=240)
    return folder / "export"


@pytest.fixture
def exported(one_export, tmp_path):
    """An export of one's own."""
    return Path(shutil.copytree(one_export, tmp_path / "export"))


@pytest.fixture
def package(site):
    """The package folder that apply.py works on."""
    return site / "sglang"


@pytest.fixture
def apply(exported, package, tmp_path):
    """Run apply.py on `package`, as a process of its own."""

    def call(verb: str, *words: str, python: tuple[str, ...] = (sys.executable,), cwd: Path = Path("/")) -> Ran:
        done = subprocess.run(
            [*python, exported / "apply.py", verb, "--root", package, *words],
            cwd=cwd,
            env=clean_environ(tmp_path / "home"),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    return call
