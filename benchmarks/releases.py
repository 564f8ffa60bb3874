#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How long it takes to patch, verify, diff and unpatch every release of the table, from their wheels.

    .venv/bin/python benchmarks/releases.py [--workers 2]

The wheels must be in .cache/wheels (the first run of the tests puts them there); reading them counts. Two processes,
as on the smallest machine that this is built on.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support import wheels
from tests.support.releases import every_release

from ddtree_overlay.releases import KNOWN, is_supported


def main() -> int:
    """Run and print; exit 1 when a release loses a byte or a supported one has a finding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    for row in KNOWN:
        wheels.wheel(row.version)
    start = time.monotonic()
    found = every_release(options.workers)
    spent = time.monotonic() - start
    for done in found:
        state = "supported" if is_supported(done.version) else "pending"
        said = "byte-exact" if not done.lost else f"LOST {', '.join(done.lost)}"
        files = f"{done.edited:>2} edited {done.added:>2} added {done.diffed:>4} diff lines"
        print(f"{done.version:<13} {state:<10} {files}  {said}  {len(done.errors):>2} errors  {done.seconds:5.1f} s")
    total = sum(done.seconds for done in found)
    print(f"{len(found)} releases in {spent:.1f} s by the clock, {total:.1f} s of processor time")
    return 1 if any(d.lost or (d.errors and is_supported(d.version)) for d in found) else 0


if __name__ == "__main__":
    sys.exit(main())
