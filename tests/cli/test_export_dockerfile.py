# SPDX-License-Identifier: Apache-2.0
"""The Dockerfile of an export: its lines, run in a real root."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest
from tests.support.trees import differences, listing


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """The Dockerfile as pairs of instruction and argument."""
    lines = [line for line in dockerfile.read_text().splitlines() if line.strip() and not line.startswith("#")]
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines]


def build(context: Path, root: Path, given: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """What a container engine would do with the Dockerfile, in a root folder that plays the image.

    The root is this machine's in a private mount namespace, with an empty /opt; changes to installs are real.
    """
    known = {"ARG", "FROM", "COPY", "RUN"}
    ignored = (context / ".dockerignore").read_text().split()
    arguments: dict[str, str] = {}
    script = ["set -e", f"mount --rbind / {root}", f"mount -t tmpfs tmpfs {root}/opt"]
    for word, rest in instructions(context / "Dockerfile"):
        assert word in known, word
        if word == "ARG":
            name, _, default = rest.partition("=")
            arguments[name] = given.get(name, default)
        elif word == "FROM":
            assert rest == "${BASE}"
            assert arguments.pop("BASE") == "image"
        elif word == "COPY":
            source, target = rest.split()
            assert source == "."
            script += [f"mkdir -p {root}{target}", f"cp -R {shlex.quote(str(context))}/. {root}{target}"]
            script += [f"rm {root}{target}{name}" for name in ignored]
        else:
            names = [f"{name}={shlex.quote(value)}" for name, value in arguments.items()]
            script.append(f"env {' '.join(names)} chroot {root} /bin/sh -c {shlex.quote(rest)}")
    script.append(given.get("THEN", "true"))
    words = ["unshare", "-m", "--propagation", "private", "sh", "-c", "\n".join(script)]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=240)


@pytest.fixture
def context(exported, tmp_path):
    """A build context, and a folder to be the image's root."""
    if os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        if os.environ.get("CI"):
            pytest.fail("private mount namespaces are not available")
        pytest.skip("private mount namespaces need root and unshare")
    (tmp_path / "root").mkdir()
    return exported


def test_the_dockerfile_builds_and_its_image_can_be_rolled_back(context, host_python, tmp_path):
    """Its own lines, run in a root folder: the overlay is in the image, with the state that leads back."""
    site = next((host_python.parents[1] / "lib").glob("python*/site-packages"))
    pristine = listing(site)
    given = {"BASE": "image", "PYTHON": str(host_python)}
    done = build(context, tmp_path / "root", given)
    assert done.returncode == 0, done.stderr
    files = json.loads((context / "manifest.json").read_text())["files"]
    assert {f["path"]: (site / "sglang" / f["path"]).read_bytes() for f in files} == {
        f["path"]: (context / "layer" / f["path"]).read_bytes() for f in files
    }
    again = f"chroot {tmp_path}/root {host_python} /opt/ddtree-overlay/apply.py rollback --purge"
    done = build(context, tmp_path / "root", {**given, "THEN": again})
    assert done.returncode == 0, done.stderr
    assert differences(pristine, listing(site)) == []


def test_the_build_fails_on_another_sglang(context, host_python, tmp_path):
    """A base that differs by one byte stops the build, and the image's files are as they were (Hyperloom#516)."""
    site = next((host_python.parents[1] / "lib").glob("python*/site-packages"))
    target = site / "sglang/srt/server_args.py"
    data = target.read_bytes()
    target.unlink()
    target.write_bytes(data + b"\n")
    before = listing(site)
    done = build(context, tmp_path / "root", {"BASE": "image", "PYTHON": str(host_python)})
    assert done.returncode == 4, done.stderr
    assert "srt/server_args.py is not as expected" in done.stderr
    assert differences(before, listing(site)) == []
