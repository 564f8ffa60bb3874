# SPDX-License-Identifier: Apache-2.0
"""The overlay's kernels for GPUs of NVIDIA's: Triton and `ptxas` make code of each, here, where no GPU is."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.speculative import ddtree


PROJECT = Path(__file__).resolve().parents[2]
OVERLAY = Path(ddtree.__file__).parent


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What became of each launch."""
    # The modules of this release, without the rest of an SGLang, which takes long to import.
    folder = tmp_path_factory.mktemp("overlay")
    package = folder / "sglang/srt/speculative"
    package.mkdir(parents=True)
    for parent in (package, package.parent, package.parent.parent):
        (parent / "__init__.py").touch()
    (package / "ddtree").symlink_to(OVERLAY)
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # What was compiled is kept for the other release, whose SGLang has set a folder of its own.
    variables |= {"PYTHONPATH": str(folder), "TRITON_CACHE_DIR": str(PROJECT / ".cache/triton")}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("compile_kernels.py")],
        capture_output=True,
        text=True,
        check=False,
        env=variables,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def kernels() -> Iterator[str]:
    """Module and name of each of the overlay's Triton functions that no other one calls."""
    functions = [
        (path.stem, node)
        for path in sorted(OVERLAY.glob("*.py"))
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.FunctionDef) and any("triton." in ast.unparse(it) for it in node.decorator_list)
    ]
    inner = [node for _, function in functions for node in ast.walk(function)]
    called = {node.func.id for node in inner if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    names = [function.name for _, function in functions]
    assert len(set(names)) == len(names), "two functions of one name: which of them is called?"
    yield from (f"{module}.{function.name}" for module, function in functions if function.name not in called)


def test_every_launch_compiles(launches: list[dict[str, Any]]) -> None:
    """The interpreter knows no types: a name that is of two behind an `if` passed all its tests and failed on a GPU."""
    failed = [told for told in launches if "error" in told]
    names = ", ".join(sorted({told["kernel"] for told in failed}))
    first = "\n\n".join(f"{told['launch']}\n{told['error']}" for told in failed[:3])
    assert not failed, f"{len(failed)} of {len(launches)} launches do not compile, of {names}; first\n{first}"


def test_every_kernel_is_launched(launches: list[dict[str, Any]]) -> None:
    """One that is new is missed here until `kernel_launches` launches it."""
    assert sorted(set(kernels()) - {told["kernel"] for told in launches}) == []


def test_no_variant_has_a_kernel_of_its_own() -> None:
    """It would be compiled for the releases that have it alone, which may be none of those that are tested."""
    assert [
        path for path in (PROJECT / "overlay/variants").rglob("*.py") if "@triton." in path.read_text("utf-8")
    ] == []


def test_shared_memory_fits(launches: list[dict[str, Any]]) -> None:
    """What a launch wants more of than the GPU has is refused there when it is loaded, while serving."""
    too_large = [told for told in launches if told.get("shared", 0) > told["allowed"]]
    assert not too_large, "\n".join(f"{it['shared']} bytes of {it['allowed']}: {it['launch']}" for it in too_large)
