# SPDX-License-Identifier: Apache-2.0
"""`--help` of every script: it says what the script is for, starts nothing, and needs nothing heavy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


PROJECT = Path(__file__).parents[2]
#: Not on every machine, and slow to import where they are.
ABSENT = ("torch", "triton", "sglang", "safetensors")
#: These are imported by others, or print one line and take no words.
WITHOUT = {"scripts/releases"}
SCRIPTS = sorted(
    str(path.relative_to(PROJECT))
    for folder in ("scripts", "benchmarks")
    for path in (PROJECT / folder).iterdir()
    if path.is_file()
    and os.access(path, os.X_OK)
    and path.read_bytes().startswith(b"#!/usr/bin/env python")
    and str(path.relative_to(PROJECT)) not in WITHOUT
)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_starts_nothing_and_needs_nothing_heavy(script, tmp_path):
    """Whoever asks for help has perhaps no GPU, and wants no README rewritten."""
    for name in ABSENT:
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('no {name} here')\n")
    readme = (PROJECT / "README.md").stat().st_mtime_ns

    done = subprocess.run(
        [sys.executable, PROJECT / script, "--help"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: ")
    assert (PROJECT / "README.md").stat().st_mtime_ns == readme
