# SPDX-License-Identifier: Apache-2.0
"""Tensor tests of the overlay's modules; they run in the engine environment, beside a real SGLang 0.5.11."""

import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path


PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT / "src"))

from ddtree_overlay.wheels import wheel_of  # noqa: E402  (the engine environment does not install the command line)


_site = Path(tempfile.mkdtemp(prefix="ddtree-overlay-tests-"))


def pytest_configure() -> None:
    """Lay the overlay's modules over an unpacked wheel and import SGLang from there."""
    with zipfile.ZipFile(wheel_of("0.5.11", PROJECT / ".cache")) as wheel:
        wheel.extractall(_site)
    shutil.copytree(PROJECT / "overlay", _site / "sglang", dirs_exist_ok=True)
    # Seeded sampling hashes in a compiled Triton kernel: on a CPU it is interpreted, and not compiled.
    os.environ |= {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}
    sys.path[:0] = [str(PROJECT / "tests/engine/standins"), str(_site)]


def pytest_unconfigure() -> None:
    """Remove the unpacked wheel."""
    shutil.rmtree(_site, ignore_errors=True)
