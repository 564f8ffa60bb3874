# SPDX-License-Identifier: Apache-2.0
"""The published 0.5.11 with the whole overlay, upgraded to the published 0.5.12: the advised commands, as typed."""

from __future__ import annotations

import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support.fleets import Machine, machines, save_bundle, write_workspace
from tests.support.installs import new_venv, tiny_package
from tests.support.packages import Uv
from tests.support.wheels import CACHE

from ddtree_overlay.wheels import wheel_of


if TYPE_CHECKING:
    from tests.support.commands import Ran
    from tests.support.sshd import SshServer


NEW = "0.5.12"


@pytest.fixture
def host(tmp_path: Path, workspace: Path, prepared: Path, sshd: SshServer) -> Path:
    """A host on which uv installed 0.5.11, known as gpu, and its bundle; gives the interpreter."""
    python, _ = new_venv(tmp_path / "venv")
    Uv(tmp_path / "cache")("pip", "install", "--python", python, "--no-deps", wheel_of("0.5.11", CACHE))
    (workspace / "deploy.toml").write_text(sshd.toml("gpu", str(python)))
    shutil.copytree(prepared / "build", workspace / "build")
    return python


def test_an_upgrade_of_the_real_sglang(host: Path, run: Callable[..., Ran], tmp_path: Path):
    """Told by every verb, and put right by what `next:` says; a rollback then gives the bytes of the new wheel."""
    gpu = ("--host", "gpu")
    assert run("push", *gpu, "--yes").code == 0
    uv = Uv(tmp_path / "cache")
    uv("pip", "install", "--python", host, "--no-deps", "-U", wheel_of(NEW, CACHE))

    done = run("status", *gpu, "--exit-code")
    assert done.code == 3
    assert "SGLang 0.5.11 was replaced by 0.5.12 under d-0001" in done.out
    assert re.search(r"! srt/speculative/ddtree/worker\.py +left ", done.out)
    advised = next(line for line in done.out.splitlines() if "next: " in line).partition("next: ")[2]
    for verb in (("push", "--yes"), ("rollback", "--yes"), ("diff",)):
        done = run(verb[0], *gpu, *verb[1:])
        assert (done.code, "was replaced by 0.5.12" in done.err) == (4, True), done.err

    steps = [step.split() for step in advised.split(" && ")]
    assert [words[:2] for words in steps] == [["ddtree-overlay", verb] for verb in ("snapshot", "patch", "push")]
    for words in steps:
        if words[1] == "push":
            done = run("diff", *gpu, "--json")
            assert (done.code, "srt/server_args.py" in done.json["files"]) == (0, True), done.err
        yes = ["--yes"] if words[1] == "push" else []
        done = run(*words[1:], *yes)
        assert done.code == 0, done.err
    assert "pushed as d-0002" in done.out
    assert run("status", *gpu, "--exit-code").code == 0

    uv("pip", "install", "--python", host, "--no-deps", wheel_of("0.5.11", CACHE))
    done = run("verify", *gpu)
    assert done.code == 3
    assert "the host has 0.5.11 now: take the snapshot again" in done.out
    uv("pip", "install", "--python", host, "--no-deps", wheel_of(NEW, CACHE))

    assert run("push", *gpu, "--yes").code == 0
    assert run("rollback", *gpu, "--yes").code == 0
    site = next((host.parents[1] / "lib").glob("python*/site-packages"))
    with zipfile.ZipFile(wheel_of(NEW, CACHE)) as archive:
        wanted = {n: archive.read(n) for n in archive.namelist() if n.startswith("sglang/") and not n.endswith("/")}
    found = {p.relative_to(site).as_posix(): p for p in (site / "sglang").rglob("*") if p.is_file()}
    assert {n: p.read_bytes() for n, p in found.items() if "__pycache__" not in n} == wanted


def test_a_fleet_whose_hosts_were_upgraded(run: Callable[..., Ran], tmp_path: Path, workspace: Path):
    """SKEW while one is; no host changes with others while its own way back is gone; the advised step leads on."""
    fleet = machines(tmp_path / "hosts", [None], {"a": None, "b": None})
    write_workspace(workspace, fleet)
    assert run("push", "--group", "gpu", "--yes").code == 0
    for name, count in (("a", 1), ("b", 2)):
        site = fleet[name].install.site
        for path, data in {"srt/a.py": b"VALUE = 100\n", "srt/b.py": b"VALUE = 200\n"}.items():
            (site / "sglang" / path).unlink()
            (site / "sglang" / path).write_bytes(data)
        shutil.rmtree(site / "sglang-0.5.11.dist-info")
        tiny_package(site, NEW, {})
        done = run("status", "--group", "gpu", "--exit-code")
        assert done.code == 3
        assert ("SKEW" in done.out) == (count == 1)
        assert done.out.count("upgraded") == count
    save_bundle(workspace, fleet["a"], {"srt/a.py": b"VALUE = 500\n", "srt/b.py": b"VALUE = 600\n"})
    before = [tree_of(machine) for machine in fleet.values()]
    done = run("push", "--group", "gpu", "--yes")
    assert done.code == 4, done.err
    assert "a is upgraded: SGLang 0.5.11 was replaced by 0.5.12 under d-0001" in done.err
    assert "ddtree-overlay rollback --host a --purge" in done.err
    assert [tree_of(machine) for machine in fleet.values()] == before
    assert run("rollback", "--group", "gpu", "--purge", "--yes").code == 0
    assert run("push", "--group", "gpu", "--yes").code == 0
    assert run("status", "--group", "gpu", "--exit-code").code == 0


def tree_of(machine: Machine) -> dict[str, bytes]:
    """The package's files."""
    return {str(p): p.read_bytes() for p in machine.install.root.rglob("*") if p.is_file()}
