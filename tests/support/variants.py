# SPDX-License-Identifier: Apache-2.0
"""Modules of the overlay that belong to other releases than the one that the tests of tensors run in."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType


VARIANTS = Path(__file__).resolve().parents[2] / "overlay/variants"


def variant(folder: str, name: str) -> ModuleType:
    """The module `name` of overlay/variants/`folder`, anew at every call and in no package."""
    spec = importlib.util.spec_from_file_location(name, VARIANTS / folder / f"srt/speculative/ddtree/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
