# SPDX-License-Identifier: Apache-2.0
"""Files that several environments share: a real uv with one cache, links as conda makes them, labels, and mounts."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from base64 import urlsafe_b64encode
from pathlib import Path

import pytest
from tests.support.installs import Install, bundle_for, tiny_package
from tests.support.sshd import SshServer
from tests.support.trees import differences, listing
from tests.support.wheels import CACHE

from ddtree_overlay import deploy
from ddtree_overlay.errors import OverlayError
from ddtree_overlay.hosts.transport import open_transport


FILES = {
    "sglang/__init__.py": b"",
    "sglang/srt/__init__.py": b"",
    "sglang/srt/a.py": b"VALUE = 1\n",
    "sglang/srt/b.py": b"VALUE = 2\n",
    "sglang-0.5.11.dist-info/METADATA": b"Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.11\n",
    "sglang-0.5.11.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
}
RESULTS = {"srt/a.py": b"VALUE = 5\n", "srt/b.py": b"VALUE = 6\n", "srt/new/c.py": b"C = 1\n"}


def push(transport, root, results=RESULTS):
    bundle, files = bundle_for(root, results)
    return deploy.push(transport, deploy.plan_push(transport, bundle, files), files, operator="x")


class Uv:
    """uv with a cache of its own, and a wheel to install from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cache = folder / "cache"
        self.wheel = folder / "sglang-0.5.11-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            lines = []
            for name, data in FILES.items():
                archive.writestr(name, data)
                code = urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
                lines.append(f"{name},sha256={code},{len(data)}\n")
            archive.writestr("sglang-0.5.11.dist-info/RECORD", "".join([*lines, "sglang-0.5.11.dist-info/RECORD,,\n"]))

    def __call__(self, *words: object) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("UV_", "VIRTUAL_ENV"))}
        env |= {"UV_CACHE_DIR": str(self.cache), "UV_OFFLINE": "1", "UV_LINK_MODE": "hardlink", "UV_NO_CONFIG": "1"}
        done = subprocess.run(
            [Path(sys.executable).with_name("uv"), *words], env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr

    def venv(self, name: str) -> Install:
        self("venv", "--python", sys.executable, self.folder / name)
        python = self.folder / name / "bin/python"
        self.install(python)
        return Install(python, next((self.folder / name / "lib").glob("python*/site-packages")))

    def install(self, python: Path, *words: str) -> None:
        self("pip", "install", "--python", python, "--no-deps", *words, self.wheel)


def test_two_environments_of_uv_with_one_cache(tmp_path):
    """Only the one that is pushed to changes; cache and neighbour stay, a reinstall is pristine (uv#10579, #15700)."""
    uv = Uv(tmp_path)
    one, two = uv.venv("one"), uv.venv("two")
    assert one.root.joinpath("srt/a.py").stat().st_ino == two.root.joinpath("srt/a.py").stat().st_ino
    cache, neighbour, pristine = listing(uv.cache), listing(two.site), listing(one.root)
    read = "import sglang.srt.a as a; print(a.VALUE)"
    with open_transport(one.host()) as transport:
        plan = deploy.plan_push(transport, *bundle_for(one.root, RESULTS))
        assert any("hard link" in warning for warning in plan.warnings)
        push(transport, one.root)
        assert one.run(read) == "5"
        assert differences(cache, listing(uv.cache)) == []
        assert differences(neighbour, listing(two.site)) == []
        assert two.run(read) == "1"
        uv.install(one.python, "--reinstall")
        assert (one.root / "srt/a.py").read_bytes() == b"VALUE = 1\n"
        assert deploy.status(transport).state == "partial"
        push(transport, one.root)
        assert one.run(read) == "5"
        deploy.rollback(transport, to="base", purge=True)
        assert one.run(read) == "1"
    found = {k: v for k, v in listing(one.root).items() if "__pycache__" not in k}
    assert differences(pristine, found) == []
    assert differences(cache, listing(uv.cache)) == []


def test_three_names_of_one_file_as_conda_makes_them(tiny, near, tmp_path):
    """Package cache and a second environment keep bytes and inode, through push and rollback (conda#9858, #6689)."""
    others = []
    for name in ("pkgs", "second"):
        for path in ("srt/a.py", "srt/b.py"):
            other = tmp_path / name / path
            other.parent.mkdir(parents=True, exist_ok=True)
            os.link(tiny.root / path, other)
            others.append(other)
    before = {p: (p.read_bytes(), p.stat().st_ino, p.stat().st_mtime_ns) for p in others}
    push(near, tiny.root)
    deploy.rollback(near)
    push(near, tiny.root)
    deploy.rollback(near, purge=True)
    assert {p: (p.read_bytes(), p.stat().st_ino, p.stat().st_mtime_ns) for p in others} == before


def test_labels_come_through_push_and_rollback(tiny, near):
    """Extended attributes, a security label among them where one can be set (ansible#2810, r10k#661)."""
    labels = {"user.test": b"mine"}
    target = tiny.root / "srt/a.py"
    if os.geteuid() == 0:
        labels["security.selinux"] = b"system_u:object_r:lib_t:s0\0"
    for name, value in labels.items():
        try:
            os.setxattr(target, name, value)
        except OSError as e:
            if os.environ.get("CI"):
                raise
            pytest.skip(f"{name} cannot be set here: {e.strerror}")
    push(near, tiny.root)
    assert {n: os.getxattr(target, n) for n in labels} == labels
    deploy.rollback(near)
    assert {n: os.getxattr(target, n) for n in labels} == labels


def package_on(options, tiny, tmp_path, name):
    """The package folder as a mount of its own in the server's namespace, with the state folder beside it."""
    stock = tmp_path / f"stock-{name}"
    tiny_package(stock, "0.5.11")
    lines = f"mount -t tmpfs -o {options} tmpfs {tiny.root}\ncp -r {stock}/sglang/. {tiny.root}/"
    return SshServer.start(tmp_path / name, CACHE, namespace=lines)


@pytest.mark.usefixtures("namespaces")
def test_a_package_on_another_file_system_than_its_state(tiny, tmp_path):
    """A volume mounted over the package: nothing is renamed across the border (EXDEV), and both sides are measured."""
    with (
        package_on("size=8m", tiny, tmp_path, "wide") as server,
        open_transport(server.host(python=str(tiny.python))) as transport,
    ):
        push(transport, tiny.root)
        assert deploy.status(transport).state == "applied"
        assert deploy.rollback(transport, purge=True).purged
        assert deploy.status(transport).state == "pristine"
    with (
        package_on("size=64k", tiny, tmp_path, "narrow") as server,
        open_transport(server.host(python=str(tiny.python))) as transport,
    ):
        bundle, files = bundle_for(tiny.root, RESULTS)
        plan = deploy.plan_push(transport, bundle, files)
        with pytest.raises(OverlayError, match=f"no space left: {tiny.root}"):
            deploy.push(transport, plan, files, operator="x")
    assert not tiny.state.exists()
