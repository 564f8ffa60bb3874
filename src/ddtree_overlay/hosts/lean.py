# SPDX-License-Identifier: Apache-2.0
"""paramiko without `invoke`, which takes a third of its import time and only serves its own reader of `Match exec`.

Configurations are read by `ssh -G`, so that reader is not needed; paramiko gets along without the package.
"""

from __future__ import annotations

import sys
from typing import Any


_modules: dict[str, Any] = sys.modules
_absent = "invoke" not in _modules
if _absent:
    # None is Python's own way to say "cannot be imported".
    _modules["invoke"] = None
try:
    import paramiko
finally:
    if _absent:
        del _modules["invoke"]

__all__ = ["paramiko"]
