# SPDX-License-Identifier: Apache-2.0
"""Tensor tests of the overlay's modules; they run in the engine environment, beside a real SGLang.

`DDTREE_TEST_RELEASE` names another release than the oldest. Of one with the second worker, which needs the engine
environment of those (`.cache/engine-second`), only what looks at SGLang's own classes, arguments and pools is tested.
"""

import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path


PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT / "src"))

# The engine environment does not install the command line.
from ddtree_overlay.patching import SUPPORTED_RELEASES, load_overlay  # noqa: E402
from ddtree_overlay.wheels import wheel_of  # noqa: E402


RELEASE = os.environ.get("DDTREE_TEST_RELEASE", SUPPORTED_RELEASES[0])

#: What depends on the release and is not the first worker's.
OF_RELEASES = [
    "accept",
    "auto",
    "calibration_settings",
    "capturing",
    "default_budget",
    "drafter_weights",
    "ending",
    "features",
    "gates",
    "kernels_compile",
    "lane_memory",
    "lane_sizes",
    "lanes",
    "ranks",
    "recapture",
    "report",
    "shared_logits",
    "step_shapes",
    "target_backend",
    "targets",
    "tree_attention",
    "warming_second",
]

collect_ignore = []
if "srt/speculative/ddtree/emitting.py" not in load_overlay(RELEASE):  # the second worker's
    collect_ignore = sorted(
        path.name for path in Path(__file__).parent.glob("test_*.py") if path.stem[len("test_") :] not in OF_RELEASES
    )

_site = Path(tempfile.mkdtemp(prefix="ddtree-overlay-tests-"))


def pytest_configure() -> None:
    """Lay the overlay's modules over an unpacked wheel and import SGLang from there."""
    with zipfile.ZipFile(wheel_of(RELEASE, PROJECT / ".cache")) as wheel:
        wheel.extractall(_site)
    for path, data in load_overlay(RELEASE).items():
        target = _site / "sglang" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    # Seeded sampling hashes in a compiled Triton kernel: on a CPU it is interpreted, and not compiled. Threads that
    # wait for each other on a busy machine take longer than the small operations of these tests.
    os.environ |= {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    sys.path[:0] = [str(PROJECT / "tests/engine/standins"), str(_site)]


def pytest_unconfigure() -> None:
    """Remove the unpacked wheel."""
    shutil.rmtree(_site, ignore_errors=True)
