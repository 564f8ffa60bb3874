# SPDX-License-Identifier: Apache-2.0
"""The overlay's own modules without an SGLang around them."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path


PROJECT = Path(__file__).resolve().parent.parent


@contextlib.contextmanager
def overlay_importable() -> Iterator[None]:
    """Make the overlay's own modules importable as they are inside SGLang, whether or not there is one."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "sglang/srt/speculative"
        package.mkdir(parents=True)
        for parent in (package, package.parent, package.parent.parent):
            (parent / "__init__.py").touch()
        (package / "ddtree").symlink_to(PROJECT / "overlay/srt/speculative/ddtree")
        sys.path.insert(0, folder)
        yield
