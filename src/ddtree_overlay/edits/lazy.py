# SPDX-License-Identifier: Apache-2.0
"""libcst and its matchers, imported when something of them is first used.

They take a quarter of a second, which a verb that only reads the tables of edits (`snapshot`) need not wait for.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


class _Later:
    """Stands for a module until an attribute of it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        found = getattr(import_module(self._name), attribute)
        # The next time it is an attribute like any other.
        setattr(self, attribute, found)
        return found


cst = _Later("libcst")
m = _Later("libcst.matchers")
