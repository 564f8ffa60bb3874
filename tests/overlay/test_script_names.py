# SPDX-License-Identifier: Apache-2.0
"""A script's folder comes first on its path: nothing there may have the name of a package that is imported."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


PROJECT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("folder", ["benchmarks", "scripts/gpu_proofs", "scripts/gpu_watch"])
def test_no_module_beside_a_script_shadows_a_package(folder: str) -> None:
    """Nor one that Transformers would use if it were installed: it took a `kernels.py` for the package."""
    transformers = find_spec("transformers")
    assert transformers is not None
    assert transformers.origin is not None
    looks = (Path(transformers.origin).parent / "utils/import_utils.py").read_text("utf-8")
    optional = set(re.findall(r"""(?:_is_package_available|find_spec)\(["'](\w+)""", looks))
    assert "kernels" in optional
    taken = optional | set(importlib.metadata.packages_distributions()) | set(sys.stdlib_module_names)

    own = {path.stem for path in (PROJECT / folder).iterdir() if path.suffix == ".py" or path.is_dir()}
    assert not (own - {"sitecustomize"}) & taken
