# SPDX-License-Identifier: Apache-2.0
"""Published wheels of SGLang, fetched with pip from wherever pip is configured to look."""

from __future__ import annotations

import base64
import contextlib
import csv
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from ddtree_overlay.errors import ConflictError, OverlayError


#: The wheel for this Python is taken whatever runs here: its sources are the same for every one.
WHEEL_PYTHON = "3.11"
DOWNLOAD_SECONDS = 900


def wheel_of(version: str, cache: Path) -> Path:
    """The wheel of SGLang `version` in `cache`, downloaded at the first use.

    Raises:
        OverlayError: pip cannot get it.
    """
    folder = cache / "wheels"
    found = sorted(folder.glob(f"sglang-{version}-*.whl"))
    if found:
        return found[0]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temp:
        done = _pip_download(version, Path(temp))
        wheels = sorted(Path(temp).glob("*.whl"))
        if done.returncode or not wheels:
            said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()[
                -2:
            ]
            raise OverlayError(
                f"pip cannot get sglang {version}",
                why=re.sub(r" \(from versions: [^)]*\)", "", " / ".join(said)),
                next_step=f"{_by_hand(version)}  # shows what pip needs",
            )
        target = folder / wheels[0].name
        os.replace(wheels[0], target)
    return target


def _by_hand(version: str) -> str:
    return f"{shlex.quote(sys.executable)} -m pip download --no-deps sglang=={version}"


def _pip_download(version: str, folder: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    words += ["--python-version", WHEEL_PYTHON, "--implementation", "cp", "--abi", "cp311"]
    # A wheel built for any Linux will do: it is read, not run. The first tag that pip finds wins.
    for tag in ("manylinux_2_34_x86_64", "manylinux_2_28_x86_64", "manylinux2014_x86_64"):
        words += ["--platform", tag]
    words += ["--abi", "abi3", "--abi", "none", "--platform", "any", f"sglang=={version}", "--dest", str(folder)]
    try:
        return subprocess.run(words, check=False, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS)
    except subprocess.TimeoutExpired as e:
        raise OverlayError(
            f"pip did not get sglang {version} in {DOWNLOAD_SECONDS} s",
            next_step=f"{_by_hand(version)}  # shows where it stalls",
        ) from e


def check_release(folder: Path, files: Mapping[str, bytes]) -> None:
    """Compare package files with what the wheel in `folder` says about itself (RECORD).

    Raises:
        ConflictError: The unpacked wheel was changed since it was unpacked.
    """
    digests = {}
    for record in folder.glob("sglang-*.dist-info/RECORD"):
        for path, digest, _ in csv.reader(record.read_text("utf-8").splitlines()):
            digests[path.removeprefix("sglang/")] = digest
    for path, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        if digests.get(path) != f"sha256={digest}":
            raise ConflictError(
                f"{folder / 'sglang' / path} is not what was published",
                why="the unpacked wheel was changed",
                next_step=f"rm -r {shlex.quote(str(folder))}  # and run the command again",
            )


def fetch_release(version: str, cache: Path) -> Path:
    """A folder that holds the unpacked wheel of SGLang `version` (`sglang/` and its metadata).

    Raises as `wheel_of`, and when the wheel is damaged.
    """
    folder = cache / "wheels" / f"sglang-{version}"
    if folder.is_dir():
        return folder
    wheel = wheel_of(version, cache)
    temp = Path(tempfile.mkdtemp(dir=wheel.parent))
    try:
        with zipfile.ZipFile(wheel) as archive:
            # `extractall` keeps every member below `temp`, whatever its name says.
            archive.extractall(temp)
        os.chmod(temp, 0o755)  # noqa: S103 - mkdtemp gives 0700; this is a cache like any other folder
        # Somebody else may have been faster; theirs is the same.
        with contextlib.suppress(OSError):
            os.rename(temp, folder)
    except (zipfile.BadZipFile, OSError) as e:
        raise OverlayError(
            f"the wheel {wheel} cannot be unpacked",
            why=str(e),
            next_step=f"rm {shlex.quote(str(wheel))}  # and run the command again",
        ) from e
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    return folder
